"""Micro-batches in flight, against the schedules run by hand."""

import pytest

from msa_pretrain.training.planner.schedule import bubble, in_flight


@pytest.mark.parametrize("stage, micro_batches, kept", [(0, 32, 8), (3, 32, 5), (7, 32, 1), (0, 4, 4), (6, 1, 1)])
def test_one_forward_one_backward(stage, micro_batches, kept):
    assert in_flight(8, 1, stage, micro_batches) == ((kept,),)


def test_one_stage_keeps_one():
    assert in_flight(1, 1, 0, 100) == ((1,),)


def test_interleaved_schedule():
    # P = 2, V = 2, 4 micro-batches. Stage 1 warms up with (2 - 1 - 1) x 2 + 2 = 2 passes of chunk 0, then alternates:
    # F1 B1 F1 B1 F0 B0 F0 B0 ...: at the end of a forward pass (1,0) (2,0) (2,1) | (2,1) | (3,0) ...
    loads = in_flight(2, 2, 1, 4)
    assert {(1, 0), (2, 0), (2, 1), (3, 0)} <= set(loads)
    assert max(map(sum, loads)) == 3
    # stage 0 warms up with 4: two of each chunk, and one more forward pass before the first backward
    assert max(map(sum, in_flight(2, 2, 0, 4))) == 5


def test_interleaved_never_keeps_more_than_there_are():
    assert max(map(sum, in_flight(4, 3, 0, 4))) == 12


def test_earlier_stages_keep_more():
    for virtual in (1, 2, 4):
        kept = [max(map(sum, in_flight(4, virtual, stage, 16))) for stage in range(4)]
        assert kept == sorted(kept, reverse=True) and kept[0] > kept[-1]


def test_bubble():
    assert bubble(8, 1, 32) == 7 / 32 and bubble(8, 2, 32) == 7 / 64 and bubble(1, 1, 5) == 0
