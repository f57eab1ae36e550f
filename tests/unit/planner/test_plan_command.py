"""`scripts/plan.py`: its torchrun line starts the run that was planned; its messages."""

import json
import shlex
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module

from msa_pretrain.training.config import load_config


def run(folder, *words):
    command = [sys.executable, "-m", "msa_pretrain.scripts.plan", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_missions_command_passes_the_checks_of_512_gpus(tmp_path):
    done = run(tmp_path, "experiment=msa_pt_230b", "gpus=512", "gpu=h200", "data.num_workers=2", "parallel.pipeline=8")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "runs" / "plans" / "msa_pt_230b_512xh200.json").read_text())
    line = written["best"][0]["torchrun"]
    assert line in done.stdout
    words = shlex.split(line.replace("\\\n", ""))
    assert words[:3] == ["torchrun", "--nnodes=64", "--nproc_per_node=8"]
    overrides = words[words.index("msa_pretrain.scripts.pretrain") + 1 :]
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        cfg = compose("pretrain", [*overrides, "dry_run=true"])
    config = load_config(cfg, world_size=512)
    assert config.run.name == "msa_pt_230b" and config.data.num_workers == 2
    # set on the command line, so kept
    assert {word for word in overrides if "pipeline=8" in word} == {"parallel.pipeline=8"}
    memory = written["best"][0]["memory"]
    assert memory["low"] <= memory["peak"] <= memory["high"] <= memory["needed"] <= 139 * 2**30
    assert written["parameters"]["total"] == 228_689_748_992 + 219_430_400
    assert len(written["best"]) == 5 and written["fitting"] > 5


def test_nothing_fits_and_the_exit_status_says_so(tmp_path):
    words = ("experiment=msa_pt_230b", "gpus=8", "gpu=h100", "output=here/plan.json", "parallel.virtual_pipeline=1")
    done = run(tmp_path, *words)
    assert done.returncode == 1
    assert "NOTHING FITS: the nearest of" in done.stdout
    written = json.loads((tmp_path / "here" / "plan.json").read_text())
    assert written["best"] == [] and written["nearest_miss"]["memory"]["needed"] > 80e9


@pytest.mark.parametrize(
    "words, message",
    [
        (["experiment=gpu_debug"], "gpus is missing. Set gpus=..."),
        (["experiment=gpu_debug", "gpus=0"], "gpus (0) must be a whole number above 0."),
        (["experiment=gpu_debug", "gpus=12"], "gpus (12) must be whole nodes of 8. Use 16."),
        (["experiment=gpu_debug", "gpus=8", "gpu=v100"], "gpu (v100) is not known. Use h200, h100, b200."),
        (["experiment=gpu_debug", "gpus=8", "best=no"], "best (no) must be a whole number above 0."),
        (["experiment=gpu_debug", "gpus=8", "moe.topk=3"], "unknown key 'moe.topk'. Did you mean 'moe.top_k'?"),
        (["experiment=gpu_debug", "gpus=8", "moe.top_k=99"], "moe.top_k (99) must be at most moe.num_experts (16)."),
    ],
)  # fmt: skip
def test_bad_command_lines(words, message, monkeypatch, capsys):
    from msa_pretrain.scripts import plan

    monkeypatch.setattr(sys, "argv", ["plan", *words])
    with pytest.raises(SystemExit) as stopped:
        plan.main()
    assert message in str(stopped.value)
