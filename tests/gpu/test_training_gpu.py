"""Training on one GPU: the Triton backend's series against the reference backend's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from msa_pretrain.data.prepare import prepare_builtin_corpus
from msa_pretrain.training.sinks import read_metrics

pytestmark = pytest.mark.gpu
BACKENDS = ("reference", "triton")
SERIES = ("train/lm_loss", "indexer/kl", "optim/grad_norm", "optim/indexer_grad_norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu")
    prepare_builtin_corpus(path / "runs" / "data" / "builtin", max_bytes=12_000_000)
    return path


def train(folder, name, experiment, backend, tokens_per_step, steps, *overrides, lr_warmup_steps):
    """Metrics of a run with the switch in the middle; copied to $RESULTS when that is set."""
    command = [
        *(sys.executable, "-m", "msa_pretrain.scripts.pretrain", f"experiment={experiment}", f"run.name={name}"),
        f"attention.backend={backend}",
        f"training.total_tokens={steps * tokens_per_step}",
        f"training.warmup_tokens={steps // 2 * tokens_per_step}",
        f"optim.lr_warmup_tokens={lr_warmup_steps * tokens_per_step}",
        "training.eval_every=0",
        "training.eval_samples=0",
        "tracking.wandb='off'",
        *overrides,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    path = folder / "runs" / name / "metrics.jsonl"
    if "RESULTS" in os.environ:
        Path(os.environ["RESULTS"], f"{name}.jsonl").write_bytes(path.read_bytes())
    return [record for record in read_metrics(path) if "train/lm_loss" in record]


def differences(ours, reference):
    return {
        key: max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, reference, strict=True)) for key in SERIES
    }


def test_fp32_series_match_the_reference(folder):
    """The miniature in fp32, both phases. Until a near tie is decided the other way, the two agree to 1e-4."""
    reference, ours = (
        train(folder, f"smoke_{backend}", "cpu_smoke", backend, 2048, 50, lr_warmup_steps=5) for backend in BACKENDS
    )
    assert len(ours) == 50
    worst = differences(ours, reference)
    print(json.dumps(worst))
    assert max(worst.values()) <= 1e-4, worst


def test_bf16_steps_match_the_reference(folder):
    """gpu_debug at 8K tokens a step in bf16, two steps of each phase. The reference takes about 4 s a step.

    The learning rate still warms up, so that a step does not multiply the rounding of the one before.
    """
    reference, ours = (
        train(
            folder, f"debug_{backend}", "gpu_debug", backend, 8192, 4, "training.global_batch_size=1", lr_warmup_steps=3
        )
        for backend in BACKENDS
    )
    worst = differences(ours, reference)
    print(json.dumps(worst))
    assert worst["train/lm_loss"] <= 1e-3 and worst["indexer/kl"] <= 5e-3, worst


def test_bf16_trains(folder):
    ours = train(folder, "debug", "gpu_debug", "triton", 32768, 50, lr_warmup_steps=5)
    assert ours[-1]["train/lm_loss"] < 0.6 * ours[0]["train/lm_loss"]
