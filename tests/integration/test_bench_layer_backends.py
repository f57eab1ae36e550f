"""`scripts/bench_layer_backends.py` runs through on a CPU, with the torch backend alone."""

import json
import subprocess
import sys

import pytest
import torch

LOADS = ("even", "random", "uneven")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rehearsal is for machines without a GPU")
def test_rehearsal(tmp_path):
    command = [sys.executable, "-m", "msa_pretrain.scripts.bench_layer_backends", "--output", "out", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "out" / "layer_backends.json").read_text())
    assert [(row["kind"], row["load"]) for row in result["speed"]] == [("torch", load) for load in LOADS]
    for row in result["errors"]:  # bf16 against fp64: neither exact nor far
        assert all(1e-4 < row[what] < 0.02 for what in ("y", "dx", "dprobs", "dgate_up", "ddown")), row
    assert result["speed"][2]["largest_over_mean"] > 1.4
    assert len(result["training"][0]["train/lm_loss"]) == 3
    assert "| uneven" in (tmp_path / "out" / "layer_backends.md").read_text()
