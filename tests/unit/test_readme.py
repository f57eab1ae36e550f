"""The README is true: its commands pass a dry run, its files exist, its targets are in the Makefile."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
LINES = [line for block in BLOCKS for line in re.sub(r"\\\n\s*", "", block).splitlines() if line.strip()]
PRETRAIN = [line for line in LINES if "msa_pretrain.scripts.pretrain" in line]
PLAN = [line for line in LINES if "msa_pretrain.scripts.plan" in line]


@pytest.mark.parametrize("line", PRETRAIN)
def test_pretrain_commands_pass_a_dry_run(line, tmp_path):
    words = shlex.split(line, comments=True)
    arguments = words[words.index("msa_pretrain.scripts.pretrain") + 1 :]
    processes = next((word.split("=")[1] for word in words if word.startswith("--nproc_per_node")), "")
    command = [sys.executable, "-m", "msa_pretrain.scripts.pretrain", *arguments, "dry_run=true"]
    environment = {**os.environ, **({"WORLD_SIZE": processes} if processes else {})}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"GPUs                             {processes or (256 if '230b' in line else 1)} " in done.stdout


@pytest.mark.parametrize("line", PLAN)
def test_plan_commands_find_a_layout(line, tmp_path):
    words = shlex.split(line, comments=True)
    command = [sys.executable, *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "torchrun --nnodes=64 --nproc_per_node=8" in done.stdout


def test_every_command_is_known():
    assert len(PRETRAIN) == 4 and len(PLAN) == 1
    known = ("make pretrain", "make test", ".venv/bin/python -m msa_pretrain.scripts.", ".venv/bin/pip install -c ")
    assert [line for line in LINES if not line.startswith((*known, ".venv/bin/torchrun"))] == []


def test_the_four_commands_from_json_lines_to_a_blend(tmp_path):
    """All but the installation, on a model of two layers for four steps."""
    pytest.importorskip("datasets")
    section = README.split("## Your own data")[1].split("## Experiments")[0]
    install, *commands = re.sub(r"\\\n\s*", "", section.split("```")[1].removeprefix("bash\n")).splitlines()
    assert install.startswith(".venv/bin/pip install") and len(commands) == 3
    with (tmp_path / "mine.jsonl").open("w") as file:
        for number in range(300):
            file.write(json.dumps({"text": f"Line {number} of my own text. " * 30, "id": number}) + "\n")
    small = ["model.num_layers=2", "model.hidden_size=32", "model.num_query_heads=4", "model.head_dim=8"]
    small += ["model.rotary_dim=4", "attention.index_dim=8", "moe.num_experts=4", "moe.expert_hidden_size=32"]
    small += ["moe.dense_hidden_size=32", "training.total_tokens=8192", "training.warmup_tokens=4096"]
    small += [
        "training.eval_samples=4",
        "training.num_threads=1",
        "optim.lr_warmup_tokens=2048",
        "tracking.wandb='off'",
    ]
    for command in commands:
        words = [sys.executable, *shlex.split(command)[1:]]
        words += small if words[2].endswith(".pretrain") else ["--max-bytes", "400000"] if "builtin" in words else []
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    log = (tmp_path / "runs" / "blend" / "logs" / "rank_0.log").read_text()
    assert re.search(r"data runs/data/mine/train: 68\.75% of the tokens, 11 samples, 5632 tokens, 0\.\d+ epochs", log)
    assert re.search(r"data runs/data/builtin/train: 31\.25% of the tokens, 5 samples", log)
    records = [json.loads(line) for line in (tmp_path / "runs" / "blend" / "metrics.jsonl").read_text().splitlines()]
    last = next(record for record in reversed(records) if "eval/valid/lm_loss" in record)
    assert last["step"] == 4 and {"eval/valid/lm_loss/mine_valid", "eval/valid/lm_loss/builtin_valid"} <= set(last)


def test_targets_exist():
    targets = re.findall(r"^(make) ([a-z-]+)", "\n".join(LINES), re.MULTILINE)
    for _, target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, timeout=60, check=True)


def test_files_of_the_tour_exist():
    tour = README.split("## Files, in reading order")[1].split("**Dimensions")[0]
    rows = [line.split("|")[1] for line in tour.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 15
    assert [name for name in names if "<" not in name and not (ROOT / name).exists()] == []


def test_documents_speak_of_the_project_alone():
    documents = [path for path in ROOT.glob("*.md")] + [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "kernels").rglob("*.md"),
    ]
    for path in documents:
        assert not re.search(r"/(work|root|tmp|farm)/", path.read_text()), path
