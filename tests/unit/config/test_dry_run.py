"""What a dry run prints: counts by arithmetic, against numbers worked out by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from msa_pretrain.model.parameters import count_parameters
from msa_pretrain.training.dry_run import memory_of_states, report

EXPERIMENTS = sorted(path.stem for path in (Path(__file__).parents[3] / "configs" / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_passes(config_of, experiment):
    config = config_of(experiment=experiment, world_size=None)
    assert f"parameters, total                {count_parameters(config.spec).total:,}" in report(config, 512)


def test_counts_of_the_mission(config_of):
    counts = count_parameters(config_of(experiment="msa_pt_230b", world_size=None).spec)
    # QKV and output 3072 x (2 x 48 + 2 x 8) x 128, full-vector norms (48 + 8) x 128; then router, experts, two norms
    attention = 3072 * 112 * 128 + 56 * 128
    layer = attention + 256 * 3072 + 256 * 3 * 3072 * 1536 + 2 * 3072
    assert counts.backbone == 62 * layer + 2 * 200064 * 3072 + 3072 == 228_689_748_992
    assert counts.index == 62 * (3072 * 9 * 128 + 2 * 128) == 219_430_400
    active = attention + 256 * 3072 + 8 * 3 * 3072 * 1536 + 2 * 3072
    assert counts.active_outside_embeddings == 62 * active + 3072 == 9_801_344_000


def test_dry_run_of_the_mission_needs_no_gpu_and_prints_the_counts(tmp_path):
    command = [sys.executable, "-m", "msa_pretrain.scripts.pretrain", "experiment=msa_pt_230b", "dry_run=true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "228,689,748,992 (228.69B)" in done.stdout
    assert "219,430,400 (62 layers x 3,539,200)" in done.stdout
    assert "9,801,344,000 (9.80B)" in done.stdout
    assert "tokens per step                  16,777,216" in done.stdout
    assert "num_layers: 62" in done.stdout
    assert list(tmp_path.iterdir()) == []  # no folder of Hydra's, none of the run's


def test_bad_command_line_ends_with_the_message_alone(tmp_path):
    command = [sys.executable, "-m", "msa_pretrain.scripts.pretrain", "experiment=cpu_smoke", "attention.top_k=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "invalid configuration:\n  - attention.top_k (0) must be at least 1.\n"


def test_memory_of_states(config_of):
    spec = config_of(experiment="msa_pt_230b", world_size=None).spec
    memory = memory_of_states(spec, 512)
    # a middle stage has 8 layers, the outer ones 7 and an embedding or head of 614.6M parameters
    dense_layer = 3072 * 112 * 128 + 56 * 128 + 256 * 3072 + 2 * 3072 + 3_539_200
    experts_layer = 256 * 3 * 3072 * 1536 // 32
    middle = 8 * dense_layer, 8 * experts_layer
    outer = 7 * dense_layer + 200064 * 3072 + 3072, 7 * experts_layer
    dense, experts = max(middle, outer, key=sum)
    # the router is fp32: four bytes, and no main weights beside its moments
    router = (8 if (dense, experts) == middle else 7) * 256 * 3072
    assert memory["weights"] == 2 * (dense + experts) + 2 * router
    assert memory["gradients"] == 4 * (dense + experts)
    assert memory["optimizer"] == pytest.approx(12 * (dense / 64 + experts / 2) - 4 * router / 64)
