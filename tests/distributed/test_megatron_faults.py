"""Faults of megatron-core 0.16.1 that need two processes. A test that fails here names a remedy that can go."""

import pytest

pytestmark = [pytest.mark.megatron_fault, pytest.mark.layouts]


def test_batched_messages_between_two_stages_compute_a_wrong_model(walked):
    """Remedy: overlap_p2p_comm with virtual stages (model/mcore.py). Without it the first loss is wrong, silently."""
    wrong = walked.seen("batched_p2p")["series"][0]
    right = walked.seen("pp2_vpp2")["series"][0]
    assert abs(wrong["train/lm_loss"] / right["train/lm_loss"] - 1) > 1e-4
