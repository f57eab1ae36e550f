"""FP8 folders: the checkpoint that their dequantised twin gives."""

import pytest
import torch
from safetensors.torch import load_file

from msa_pretrain.training.conversion.importing import plan_import, run_import
from msa_pretrain.training.conversion.stored import CheckpointReader
from msa_pretrain.training.conversion.verifying import compare, verify_tensors

KINDS = {
    "minimax_m2": (("q_proj", "k_proj", "v_proj", "o_proj", ".w1.", ".w2.", ".w3."), (128, 128)),
    "minimax_m3": (
        ("attn.q_proj", "attn.o_proj", ".w1.", ".w2.", ".w3.", "gate_proj", "up_proj", "down_proj"),
        (1, 32),
    ),
}


def quantized_twins(tensors, kind):
    """(dequantised bf16, fp8 with scales) of the same values; scales are powers of two, so nothing is rounded."""
    names, (rows, columns) = KINDS[kind]
    dense, packed = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(".weight") and any(part in name for part in names)]:
        weight = tensors[name].float().to(torch.float8_e4m3fn)
        shape = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        exponent = torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(len(name)))
        scale = torch.exp2(exponent.float())
        full = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
        dense[name] = (weight.float() * full).bfloat16()
        packed[name] = weight
        packed[f"{name}_scale_inv"] = scale if rows > 1 else (exponent + 127).to(torch.uint8)
    return dense, packed


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp8_folder_gives_the_checkpoint_of_its_dequantised_twin(copy_of, change_tensors, tmp_path, kind):
    folder = copy_of(kind, torch.bfloat16)
    dense, packed = quantized_twins(load_file(folder / "model.safetensors"), kind)
    checkpoints = []
    for order, tensors in enumerate((dense, packed)):
        change_tensors(folder, lambda old, tensors=tensors: (old.clear(), old.update(tensors)))
        checkpoints.append(run_import(plan_import(folder), tmp_path / f"checkpoint{order}"))
    one, other = map(CheckpointReader, checkpoints)
    assert one.tensors.keys() == other.tensors.keys()
    for key in one.tensors:
        assert one.read(key).dtype == other.read(key).dtype and torch.equal(one.read(key), other.read(key)), key
    verified = verify_tensors(compare(folder, checkpoints[1]))
    assert len(verified) == len(dense) and not any(tensor.max_difference for tensor in verified)
