"""What a format has in every model and ours may lack: a head of its own, a shared expert, zero-centred norms."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from msa_pretrain.model.config import AttentionKind, Precision
from msa_pretrain.training.config import architecture_to_dict, to_yaml
from msa_pretrain.training.conversion.exporting import ExportChoices, plan_export, run_export
from msa_pretrain.training.conversion.importing import plan_import
from msa_pretrain.training.conversion.logits import compare_logits
from msa_pretrain.training.conversion.matching import model_tensors
from msa_pretrain.training.conversion.stored import CheckpointWriter, Chunk
from msa_pretrain.training.conversion.verifying import compare, verify_tensors


def random_checkpoint(architecture, final):
    """A checkpoint of any model, as training would write it: whole tensors."""
    writer = CheckpointWriter(final, "random")
    tensors = model_tensors(architecture.spec(Precision.fp32))
    chunks = [Chunk(f"model.{name}", torch.float32, shape, (0,) * len(shape), shape) for name, shape in tensors.items()]

    def make(number):
        chunk = chunks[number]
        noise = 0.2 * torch.randn(chunk.shape, generator=torch.Generator().manual_seed(number))
        return 1 + noise if chunk.key.endswith("norm.weight") else noise

    writer.write(0, chunks, make)
    config = {**architecture_to_dict(architecture), "training": {"precision": "fp32"}}
    writer.finish({"config": to_yaml(config)}, {})
    return final


@pytest.mark.parametrize("envelope", [True, False], ids=["envelope", "text"])
def test_a_tied_model_without_shared_expert_in_the_m3_format(saved, tokens, tmp_path, envelope):
    """Plain norms become w - 1, the shared expert zeros, the head a copy; transformers computes what we do."""
    architecture = plan_import(saved("minimax_m3")).architecture
    architecture = replace(
        architecture,
        model=replace(architecture.model, tie_embeddings=True, zero_centered_norms=False),
        moe=replace(architecture.moe, shared_hidden_size=0),
    )
    checkpoint = random_checkpoint(architecture, tmp_path / "checkpoint")
    choices = ExportChoices(family="minimax_m3", envelope=envelope, max_positions=64)
    folder = run_export(plan_export(checkpoint, choices), tmp_path / "exported")
    for found in compare_logits(folder, checkpoint, [tokens(13), tokens(61)]):
        assert found.max_difference < 1e-4 and found.same_choice == 1
    verified = {tensor.name: tensor for tensor in verify_tensors(compare(folder, checkpoint))}
    prefix = "language_model." if envelope else ""
    assert f"{prefix}lm_head.weight" in verified
    assert f"{prefix}model.layers.1.block_sparse_moe.shared_experts.up_proj.weight" in verified
    # w - 1 + 1 rounds in fp32, and nothing else does
    off = {name for name, tensor in verified.items() if tensor.max_difference}
    assert all("norm" in name and verified[name].max_difference < 1e-6 for name in off)


def test_a_vision_tower_is_taken_from_a_release(saved, tmp_path):
    checkpoint = random_checkpoint(plan_import(saved("minimax_m3")).architecture, tmp_path / "checkpoint")
    small = ExportChoices(family="minimax_m3", max_positions=64)
    release = run_export(plan_export(checkpoint, small), tmp_path / "release")
    tensors = load_file(release / "model.safetensors")
    vision = {
        name: value + 3 for name, value in tensors.items() if name.startswith(("vision_tower.", "multi_", "patch_"))
    }
    assert len(vision) == 3 + 16 + 8 and all(value.eq(3).all() for value in vision.values())
    save_file(tensors | vision, release / "model.safetensors", metadata={"format": "pt"})
    grafted = run_export(plan_export(checkpoint, replace(small, vision_from=release)), tmp_path / "grafted")
    written = load_file(grafted / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in vision.items()) and written.keys() == tensors.keys()


def test_the_m3_format_without_sparse_attention(saved, tokens, tmp_path):
    architecture = plan_import(saved("minimax_m3")).architecture
    dense = replace(architecture.attention, kind=AttentionKind.dense, full_layers=[])
    checkpoint = random_checkpoint(replace(architecture, attention=dense), tmp_path / "checkpoint")
    folder = run_export(
        plan_export(checkpoint, ExportChoices(family="minimax_m3", max_positions=64)), tmp_path / "exported"
    )
    for found in compare_logits(folder, checkpoint, [tokens(61)]):
        assert found.max_difference < 1e-4 and found.same_choice == 1
    assert plan_import(folder).spec.msa_layers == []
