"""The README is true: its commands pass a dry run, its files exist, its targets are in the Makefile."""

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
    assert len(PRETRAIN) == 3 and len(PLAN) == 1
    known = ("make pretrain", "make test", ".venv/bin/python -m msa_pretrain.scripts.")
    assert [line for line in LINES if not line.startswith((*known, ".venv/bin/torchrun"))] == []


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
