"""MiniMax-M3's indexer: the blocks that transformers selects, and proof that they matter."""

from dataclasses import replace

import pytest
import torch

from msa_pretrain.model import attention as attention_module
from msa_pretrain.training.conversion.importing import plan_import, run_import
from msa_pretrain.training.conversion.logits import hf_model, loaded_model, logits_of


@pytest.fixture
def ours_selected(monkeypatch):
    """By layer: block ids [t, groups, k] of every selection."""
    selected = []
    select = attention_module.select_blocks

    def keep(*inputs, **options):
        found = select(*inputs, **options)
        selected.append(found[0])
        return found

    monkeypatch.setattr(attention_module, "select_blocks", keep)
    return selected


def sets(block_indices: torch.Tensor) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in block_indices.flatten(0, -2)]


def test_the_selected_blocks_are_those_of_transformers(saved, tokens, tmp_path, ours_selected):
    checkpoint = run_import(plan_import(saved("minimax_m3")), tmp_path / "checkpoint")
    model = hf_model(saved("minimax_m3"))
    theirs = []
    for name, module in model.named_modules():
        if name.endswith(".indexer"):
            module.register_forward_hook(lambda module, inputs, output: theirs.append(output))
    with torch.no_grad():
        model(tokens(61)[None])
    with loaded_model(checkpoint) as (ours, spec):
        with_index = logits_of(ours, spec, tokens(61))
        for layer, (mine, other) in enumerate(zip(ours_selected, theirs, strict=True)):
            # theirs [1, groups, t, k]
            assert sets(mine) == sets(other[0].transpose(0, 1)), layer
        far = [min(row) < position // 2 // 8 - 1 for position, row in enumerate(sets(ours_selected[0]))]
        assert sum(far) > 20  # blocks beyond the local one and the one before it
        for layer in ours.decoder.layers[1:]:
            layer.self_attention.spec = replace(spec, attention=replace(spec.attention, top_k=1))
        assert (logits_of(ours, spec, tokens(61)) - with_index)[17:].abs().max() > 0.1
