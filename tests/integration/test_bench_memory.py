"""`scripts/bench_memory.py` runs through on a CPU, where it says what it does not measure."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_tiny_mode(tmp_path):
    command = [sys.executable, "-m", "msa_pretrain.scripts.bench_memory", "--output", "out", "--device", "cpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "out" / "memory.json").read_text())
    assert [(row["phase"], row["recompute"]) for row in result["rows"]] == [
        (phase, recompute) for phase in ("dense", "warmup", "sparse") for recompute in ("none", "full")
    ]
    assert all(row["measured_gib"] is None and row["predicted_gib"] > 0 for row in result["rows"])
    # the reference's index scores come on top in the other phases
    assert [row["counted_over_predicted"] for row in result["rows"][:2]] == [1.0, 1.0]
    assert all(1 < row["counted_over_predicted"] < 1.1 for row in result["rows"][2:])
    text = (tmp_path / "out" / "memory.md").read_text()
    assert "peak memory is not measured on a CPU" in text and "not measured" in text
    assert result["experts"]["forward_backward_ms"] > result["experts"]["forward_ms"] > 0
