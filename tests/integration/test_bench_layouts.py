"""`scripts/bench_layouts.py` on a CPU: what it measures there, and what it does when there is no time."""

import json
import os
import subprocess
import sys

import pytest

COMPARED = ("train/lm_loss", "indexer/kl", "optim/grad_norm", "optim/indexer_grad_norm")


def bench(folder, *arguments):
    command = [sys.executable, "-m", "msa_pretrain.scripts.bench_layouts", "--output", "out", "--device", "cpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    return done, json.loads((folder / "out" / "layouts.json").read_text()), (folder / "out" / "layouts.md").read_text()


@pytest.mark.slow
def test_two_processes_are_compared_with_one(tmp_path):
    done, result, text = bench(tmp_path, "--steps", "4", "--limit-s", "700")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["1 GPU", "1 GPU, long", "CP=2, long", "TP=2 with SP", "EP=2", "PP=2", "DP=2"]
    for row in rows.values():
        assert row["phase"] == ["warmup"] * 2 + ["sparse"] * 2 and row["peak_gib"] == [None] * row["gpus"]
        for key in COMPARED:
            assert row["series"][key] == pytest.approx(rows[row["reference"]]["series"][key], rel=1e-3)
    assert text.count("| 4 |") == 7 and "failed" not in text


@pytest.mark.slow
def test_without_time_every_layout_is_reported(tmp_path):
    done, result, text = bench(tmp_path, "--steps", "4", "--limit-s", "0.1")
    assert done.returncode == 1 and "some layouts failed" in done.stderr
    assert len(result["rows"]) == 7 and all("no time left" in row["error"] for row in result["rows"])
    assert text.count("failed:**") == 7
