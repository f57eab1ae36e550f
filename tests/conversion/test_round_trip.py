"""Import, export and verify: what is on disk afterwards, against the folder that it came from."""

import json

import pytest
import torch
from safetensors.torch import load_file

from msa_pretrain.model.hf import FAMILIES
from msa_pretrain.scripts.convert import main
from msa_pretrain.training.conversion.importing import plan_import, run_import


def run(*arguments) -> None:
    main([str(argument) for argument in arguments])


def tensors_of(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def export(checkpoint, folder, family, *arguments):
    layout = ["--layout", "text"] if family == "minimax_m3" else []
    run("export", "--from", checkpoint, "--to", folder, "--family", family, "--max-positions", 256, *layout, *arguments)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3 tied"])
def test_export_gives_back_the_bytes_that_were_imported(saved, tmp_path, name, dtype):
    """T6.1, T6.3, T6.4 end to end, padded vocabulary and fp32 bias included."""
    source, checkpoint, family = saved(name, dtype), tmp_path / "checkpoint", name.split()[0]
    run("import", "--from", source, "--to", checkpoint, "--vocab-multiple", 64)
    folder = export(checkpoint, tmp_path / "exported", family, "--max-shard-gb", 0.0001)
    before, after = tensors_of(source), tensors_of(folder)
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert after[key].dtype == value.dtype and torch.equal(after[key], value), key
    assert before["model.embed_tokens.weight"].shape == (101, 48)
    if family.startswith("minimax"):
        assert before["model.layers.1.block_sparse_moe.e_score_correction_bias"].dtype == torch.float32
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in before.values())
    assert {file.name for file in folder.glob("*.safetensors")} == set(index["weight_map"].values())
    # the folder describes the model that it came from
    again = plan_import(folder)
    assert again.architecture == plan_import(source).architecture and again.vocab_size == 101


def test_the_three_commands_by_hand(saved, tmp_path, capsys):
    """The logits of an export are those of the checkpoint, and a changed weight shows in either check."""
    checkpoint = tmp_path / "checkpoint"
    run("import", "--from", saved("minimax_m2"), "--to", checkpoint)
    folder = export(checkpoint, tmp_path / "exported", "minimax_m2")
    run("verify", "--hf", folder, "--checkpoint", checkpoint, "--checksums", tmp_path / "sums.json")
    printed = capsys.readouterr().out
    assert "peak host memory" in printed and "69 tensors are the same, by value and checksum" in printed
    assert "logits of 300 tokens: differ by up to" in printed
    assert len(json.loads((tmp_path / "sums.json").read_text())) == 69


def test_verify_names_the_tensor_that_differs(copy_of, change_tensors, tmp_path):
    folder = copy_of("qwen3")
    run_import(plan_import(folder), tmp_path / "checkpoint")

    def swap(tensors):
        key = tensors["model.layers.1.self_attn.k_proj.weight"]
        key[:16], key[16:] = key[16:].clone(), key[:16].clone()

    change_tensors(folder, swap)
    with pytest.raises(
        SystemExit, match=r"1 of 36 tensors differ:\n  - model\.layers\.1\.self_attn\.k_proj\.weight: by"
    ):
        run("verify", "--hf", folder, "--checkpoint", tmp_path / "checkpoint", "--no-logits")
