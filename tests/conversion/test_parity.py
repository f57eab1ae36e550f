"""The same logits as transformers, after an import: the map, the configs and the model itself, for every family."""

import pytest
import torch

from msa_pretrain.training.conversion.importing import plan_import, run_import
from msa_pretrain.training.conversion.logits import compare_logits

# Largest difference measured at either length, in fp32: 1.1e-5 for logits of up to 30.
TOLERANCE = 1e-4
FAMILIES = ("llama", "qwen3", "qwen3_moe", "minimax_m2", "minimax_m3")
LENGTHS = (13, 16, 17, 61)  # M3 keeps 2 blocks of 8


@pytest.mark.parametrize("name", [*FAMILIES, "llama tied", "qwen3 tied"])
def test_logits_are_those_of_transformers(saved, tokens, tmp_path, name):
    """T6.7 too: below k * block tokens the sparse model is the dense one in transformers as here."""
    checkpoint = run_import(plan_import(saved(name)), tmp_path / "checkpoint")
    for found in compare_logits(saved(name), checkpoint, [tokens(length) for length in LENGTHS]):
        print(name, found)
        assert found.max_difference < TOLERANCE, found
        assert found.same_choice == 1.0


def test_bf16_weights_with_an_fp32_router(saved, tokens, tmp_path):
    """As released. Both compute in fp32."""
    folder = saved("minimax_m3", torch.bfloat16)
    checkpoint = run_import(plan_import(folder), tmp_path / "checkpoint")
    for found in compare_logits(folder, checkpoint, [tokens(61)]):
        assert found.max_difference < TOLERANCE and found.same_choice == 1.0
