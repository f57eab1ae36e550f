"""What a machine lacks for a config: said by a dry run, refused at launch."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest
import torch

from msa_pretrain.training.machine import machine_problems, transformer_engine_problem

NEEDS_GPU = "needs a CUDA GPU, and torch sees none."
TE = ("model.backend=transformer_engine", "training.precision=bf16")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def package(monkeypatch, version, error=None):
    def installed(name):
        assert name == "transformer-engine"
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    def load(name):
        assert name == "transformer_engine.pytorch"
        if error is not None:
            raise error

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(importlib, "import_module", load)


def test_without_a_gpu_both_backends_are_named(config_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problems = list(machine_problems(config_of(*TE, "attention.backend=triton", experiment="gpu_debug")))
    assert problems == [
        f"attention.backend=triton {NEEDS_GPU} Use reference.",
        f"model.backend=transformer_engine {NEEDS_GPU} Use torch.",
    ]
    assert not list(machine_problems(config_of("attention.backend=reference", experiment="gpu_debug")))


@pytest.mark.parametrize(
    "version, error, problem",
    [
        (None, None, "needs the package transformer-engine, which is not installed. Install Transformer Engine 2.11 "),
        ("2.10.0", None, "needs transformer-engine 2.11, and 2.10.0 is installed. Install Transformer Engine 2.11 "),
        ("2.110.0", None, "needs transformer-engine 2.11, and 2.110.0 is installed. "),
        ("2.11.0", OSError("libcudnn.so.9"), "does not import (OSError: libcudnn.so.9). Install Transformer Engine "),
        ("2.11.0", AssertionError("Could not find TE core"), "does not import (AssertionError: Could not find TE core"),
        ("2.11.0", None, None),
    ],
    ids=str,
)
def test_the_package_is_there_in_the_right_version_and_imports(gpu, monkeypatch, version, error, problem):
    package(monkeypatch, version, error)
    found = transformer_engine_problem()
    assert found is None if problem is None else problem in found
    assert found is None or found.endswith("or use torch.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_a_dry_run_passes_and_says_what_the_launch_refuses(tmp_path):
    words = ["experiment=gpu_debug", "attention.backend=reference", "training.warmup_tokens=0", *TE]
    words = [sys.executable, "-m", "msa_pretrain.scripts.pretrain", *words]
    options = dict(cwd=tmp_path, capture_output=True, text=True, timeout=60)
    refusal = f"model.backend=transformer_engine {NEEDS_GPU} Use torch."
    rehearsed = subprocess.run([*words, "dry_run=true"], check=True, **options)
    assert rehearsed.stdout.endswith(f"refused on this machine: {refusal}\n")
    data = ["data.train=[corpus]", "data.valid=[]", "training.eval_every=0", "training.eval_samples=0"]
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    launched = subprocess.run([*words, *data], check=False, **options)
    assert launched.returncode == 1 and launched.stderr == f"invalid configuration:\n  - {refusal}\n"
