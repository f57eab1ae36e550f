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


OPTIMIZER = {
    "reset": "reset: all moments start at zero",
    "keep": "kept: fp32 weights, moments and Adam steps; a new index branch starts at step 0",
}


@pytest.mark.parametrize("choice", OPTIMIZER)
def test_a_start_from_a_checkpoint_is_said(config_of, choice):
    text = report(config_of("training.init_from=runs/dense", f"training.init_optimizer={choice}"), 1)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[lines.index("weights from runs/dense") + 1] == f"optimizer {OPTIMIZER[choice]}"
    assert "weights from" not in report(config_of(), 1)


def test_counts_of_the_mission(config_of):
    counts = count_parameters(config_of(experiment="msa_pt_230b", world_size=None).spec)
    # QKV and output 3072 x (2 x 48 + 2 x 8) x 128, full-vector norms (48 + 8) x 128; then router, experts, two norms
    attention = 3072 * 112 * 128 + 56 * 128
    layer = attention + 256 * 3072 + 256 * 3 * 3072 * 1536 + 2 * 3072
    assert counts.backbone == 62 * layer + 2 * 200064 * 3072 + 3072 == 228_689_748_992
    assert counts.index == 62 * (3072 * 9 * 128 + 2 * 128) == 219_430_400
    active = attention + 256 * 3072 + 8 * 3 * 3072 * 1536 + 2 * 3072
    assert counts.active_outside_embeddings == 62 * active + 3072 == 9_801_344_000


def mlps(hidden, experts, expert, shared=0):
    """Router, experts and shared expert of one MoE layer."""
    return experts * hidden + experts * 3 * hidden * expert + 3 * hidden * shared


def test_counts_of_minimax_m3(config_of):
    """The published number of text parameters, index branch included, to the last digit."""
    counts = count_parameters(config_of(experiment="msa_pt_428b", world_size=None).spec)
    attention = 6144 * (2 * 64 + 2 * 4) * 128 + 2 * 128
    index = 6144 * 5 * 128 + 2 * 128
    dense, sparse = 3 * 6144 * 12288, mlps(6144, 128, 3072, 3072)
    assert counts.index == 57 * index
    assert counts.backbone == 60 * (attention + 2 * 6144) + 3 * dense + 57 * sparse + 2 * 200064 * 6144 + 6144
    assert counts.total == 426_174_565_632
    active = 60 * (attention + 2 * 6144) + 3 * dense + 57 * (128 * 6144 + 5 * 3 * 6144 * 3072) + 6144
    assert counts.active_outside_embeddings == active == 23_279_932_416


def test_counts_of_the_109b_model(config_of):
    """The paper gives no expert width: 2304 is assumed, 1.1% below the published size; 2560 would be 10% above it."""
    counts = count_parameters(config_of(experiment="msa_pt_109b", world_size=None).spec)
    rest = 41 * (3072 * (2 * 64 + 2 * 4) * 128 + 2 * 128 + 2 * 3072) + 3 * 3 * 3072 * 9216 + 2 * 200064 * 3072 + 3072
    assert counts.backbone == rest + 38 * mlps(3072, 128, 2304, 2304) == 107_779_198_208
    sizes = [rest + 38 * mlps(3072, 128, width, width) for width in range(1024, 4096, 256)]
    assert min(sizes, key=lambda size: abs(size - 109e9)) == counts.backbone
    assert counts.index == 38 * (3072 * 5 * 128 + 2 * 128)
    assert (
        config_of(experiment="msa_cpt_109b", world_size=None).model
        == config_of(experiment="msa_pt_109b", world_size=None).model
    )


def test_counts_of_the_pilot(config_of):
    """The published sizes, 10.53B and 1.47B active, follow with 0.56B in embedding and head, not with 200,064 rows."""
    counts = count_parameters(config_of(experiment="pilot_10b", world_size=None).spec)
    attention = 2048 * (2 * 32 + 2 * 4) * 128 + 2 * 128
    layers = 16 * (attention + mlps(2048, 64, 1536) + 2 * 2048) + 2048
    assert counts.backbone == layers + 2 * 200064 * 2048 == 10_787_297_280
    small = count_parameters(config_of("model.vocab_size=137216", experiment="pilot_10b", world_size=None).spec)
    active = small.active_outside_embeddings + small.embedding + small.head
    assert small.active_outside_embeddings == layers - 16 * 60 * 3 * 2048 * 1536
    assert (round(small.backbone / 1e9, 2), round(active / 1e9, 2)) == (10.53, 1.47)


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
