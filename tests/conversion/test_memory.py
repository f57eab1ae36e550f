"""A conversion holds a few tensors at a time, whatever the size of the checkpoint (field case T6.10)."""

import json
import re
import resource
import subprocess
import sys

import pytest
import torch

from msa_pretrain.model.hf import QWEN3
from msa_pretrain.training.conversion.importing import plan_import
from msa_pretrain.training.conversion.matching import model_tensors
from msa_pretrain.training.conversion.tensor_files import Planned, write_header

LIMIT_BYTES = 2 * 2**30
GIB = 2**30


def fake_checkpoint(folder, num_layers: int) -> int:
    """A Qwen3 of zeros that take no disk; returns its bytes."""
    config = dict(
        model_type="qwen3",
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (32000, 2048), "model.norm.weight": (2048,)}
    for layer in range(num_layers):
        place = f"model.layers.{layer}."
        shapes |= {f"{place}{name}_layernorm.weight": (2048,) for name in ("input", "post_attention")}
        shapes |= {f"{place}self_attn.{name}_norm.weight": (128,) for name in "qk"}
        shapes |= {f"{place}self_attn.{name}_proj.weight": (512, 2048) for name in "kv"}
        shapes |= {f"{place}self_attn.{name}_proj.weight": (2048, 2048) for name in "qo"}
        shapes |= {f"{place}mlp.{name}_proj.weight": (8192, 2048) for name in ("gate", "up")}
        shapes[f"{place}mlp.down_proj.weight"] = (2048, 8192)
    planned = [Planned(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    total = sum(tensor.num_bytes for tensor in planned)
    with (folder / "model.safetensors").open("wb") as stream:
        write_header(stream, planned)
        stream.truncate(stream.tell() + total)
    return total


def test_the_announced_peak_is_that_of_the_largest_tensor(tmp_path):
    fake_checkpoint(tmp_path, num_layers=2)
    plan = plan_import(tmp_path)
    embedding = 32000 * 2048 * 2
    assert plan.peak_bytes == 3 * embedding  # read, made and written
    assert set(model_tensors(plan.spec)) == {piece.ours for piece in QWEN3.pieces(plan.spec)}


@pytest.mark.slow
def test_four_gigabytes_pass_through_two(tmp_path):
    """Both ways under a limit on the address space, and within the announced peak."""
    source, checkpoint, exported = tmp_path / "hf", tmp_path / "checkpoint", tmp_path / "exported"
    source.mkdir()
    assert fake_checkpoint(source, num_layers=34) > 4e9
    convert = [sys.executable, "-m", "msa_pretrain.scripts.convert"]
    export = ["--from", str(checkpoint), "--to", str(exported), "--family", "qwen3", "--max-positions", "4096"]
    for arguments in (["import", "--from", str(source), "--to", str(checkpoint)], ["export", *export]):
        done = subprocess.run(
            [*convert, *arguments],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
        )
        assert not done.returncode, done.stdout + done.stderr
        announced = float(re.search(r"peak host memory ([\d.]+) GiB", done.stdout)[1])
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / GIB
        print(f"{arguments[0]}: announced {announced} GiB, used {used:.2f} GiB")
        assert used <= announced
