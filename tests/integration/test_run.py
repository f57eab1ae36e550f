"""The command a user types, from config to report, on a tiny model and real text."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from msa_pretrain.data.prepare import prepare_builtin_corpus
from msa_pretrain.training.sinks import read_metrics

GOLDEN = Path(__file__).parents[1] / "golden"
SECRET = "hf_abcdefghijklmnopqrstuvwx"
COMMAND = [
    sys.executable,
    "-m",
    "msa_pretrain.scripts.pretrain",
    "experiment=cpu_smoke",
    "run.name=tiny",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_query_heads=4",
    "model.head_dim=8",
    "model.rotary_dim=4",
    "attention.index_dim=8",
    "attention.top_k=2",
    "moe.num_experts=4",
    "moe.expert_hidden_size=32",
    "moe.dense_hidden_size=32",
    "training.seq_length=64",
    "training.total_tokens=5120",
    "training.warmup_tokens=2560",
    "training.eval_every=10",
    "training.eval_samples=4",
    "training.num_threads=1",
    "optim.lr=1e-2",
    "optim.min_lr=1e-3",
    "optim.lr_warmup_tokens=512",
    "checkpoint.every_steps=10",
    "tracking.wandb=offline",
    f"tracking.project={SECRET}",
]


def run(folder, *overrides, check=True):
    done = subprocess.run([*COMMAND, *overrides], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if check and done.returncode:
        raise AssertionError(done.stdout[-2000:] + done.stderr[-4000:])
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    prepare_builtin_corpus(folder / "runs" / "data" / "builtin", max_bytes=400_000)
    return folder, run(folder)


def test_the_folder_of_a_run(finished):
    folder, _ = finished
    path = folder / "runs" / "tiny"
    assert {item.name for item in path.iterdir()} == {
        "config.yaml",
        "overrides.txt",
        "versions.json",
        "metrics.jsonl",
        "wandb",
        "logs",
        "checkpoints",
        "report.html",
    }
    assert (path / "checkpoints" / "latest").read_text() == "step_20\n"
    assert {item.name for item in (path / "checkpoints").iterdir()} == {"latest", "step_10", "step_20"}
    assert "total_tokens: 5120" in (path / "config.yaml").read_text()
    assert "training.total_tokens=5120" in (path / "overrides.txt").read_text().splitlines()
    assert json.loads((path / "versions.json").read_text())["megatron-core"] == "0.16.1"
    assert "finished in" in (path / "logs" / "rank_0.log").read_text()
    assert {item.name for item in folder.iterdir()} == {"runs"}  # nothing of Hydra's


def test_the_metrics_of_a_run(finished):
    folder, _ = finished
    records = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")
    steps = [record for record in records if "train/lm_loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 21))
    assert [record["train/phase"] for record in steps] == ["warmup"] * 10 + ["sparse"] * 10
    assert [record["consumed_tokens"] for record in steps] == list(range(256, 5121, 256))
    assert steps[-1]["train/lm_loss"] < 0.8 * steps[0]["train/lm_loss"]
    first = steps[0]
    assert first["indexer/kl"] == pytest.approx((first["indexer/kl/layer_0"] + first["indexer/kl/layer_1"]) / 2)
    weighted = first["indexer/kl/layer_0"] + first["indexer/kl/layer_1"]
    assert first["train/loss"] == pytest.approx(first["train/lm_loss"] + weighted)
    assert first["indexer/kl_share_of_loss"] == pytest.approx(weighted / first["train/loss"])
    measured = [record["step"] for record in steps if "indexer/score_recall" in record]
    assert measured == [10, 20]
    validated = [record["step"] for record in records if "eval/valid/lm_loss" in record]
    assert validated == [0, 10, 10, 20]  # step 10: in the warm-up as scheduled, and at the switch in both phases
    switch = next(record for record in records if "eval/valid/lm_loss_sparse" in record)
    assert switch["step"] == 10 and switch["eval/valid/lm_loss_warmup"] == switch["eval/valid/lm_loss"]


def test_what_a_user_sees(finished):
    _, done = finished
    lines = done.stdout.splitlines()
    assert lines[0].startswith("data runs/data/builtin/train: 100.00% of the tokens, 80 samples, 5120 tokens, 0.0")
    progress = [line for line in lines if line.startswith("step ")]
    assert len(progress) == 20
    assert re.match(r"step  1/20  warmup +256 tokens  lm loss 5\.\d+  KL 0\.\d+ .*tokens/s  \d+s left", progress[0]), (
        progress[0]
    )
    table = "\n".join(lines)
    for label in ("train LM loss", "valid LM loss", "at the switch", "block recall", "score recall", "captured"):
        assert label in table
    assert lines[-1] == "report: runs/tiny/report.html"


def test_secrets_reach_no_file(finished):
    folder, _ = finished
    leaks = [
        path
        for path in (folder / "runs" / "tiny").rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes() and "wandb" not in path.parts
    ]
    assert leaks == []
    assert "project: <redacted>" in (folder / "runs" / "tiny" / "config.yaml").read_text()


def test_a_finished_run_started_again_only_reports(finished):
    folder, first = finished
    runs_before = sorted(path.name for path in (folder / "runs" / "tiny" / "wandb").glob("offline-run-*"))
    again = run(folder)
    assert not [line for line in again.stdout.splitlines() if line.startswith("step ")]
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    # the W&B run goes on under the id that the checkpoint holds
    ids = {path.name.rsplit("-", 1)[1] for path in (folder / "runs" / "tiny" / "wandb").glob("offline-run-*")}
    assert len(ids) == 1 and len(runs_before) == 1


def test_starting_anew_in_the_folder_of_a_run_is_refused(finished):
    folder, _ = finished
    done = run(folder, "training.resume=none", check=False)
    assert done.returncode != 0
    assert "runs/tiny holds a run already. Choose another run.name, or training.resume=auto" in done.stderr


def test_a_run_is_lengthened_with_another_blend_and_a_test_set(finished, tmp_path):
    """The samples so far stay what they were, so neither the new length nor the blend from here on is refused."""
    folder, _ = finished
    shutil.copytree(folder / "runs", tmp_path / "runs")
    more = ["training.total_tokens=6144", "data.train_schedule=[{from_tokens:5120,blend:[runs/data/builtin/valid]}]"]
    sets = ["data.valid=[runs/data/builtin/valid:3,runs/data/builtin/train]", "data.test=[runs/data/builtin/valid]"]
    done = run(tmp_path, *more, *sets)
    steps = [line.split("/")[0] for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [int(step.removeprefix("step ")) for step in steps] == [21, 22, 23, 24]
    log = (tmp_path / "runs" / "tiny" / "logs" / "rank_0.log").read_text()
    assert "the run was planned for 80 samples and now is for 96: the order of the samples is the same" in log
    assert "samples consumed so far: {'runs/data/builtin/train': 80, 'runs/data/builtin/valid': 0}" in log
    assert re.search(
        r"data runs/data/builtin/valid: 16\.67% of the tokens, 16 samples, 1024 tokens, 0\.\d+ epochs", log
    )
    records = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    last = next(record for record in reversed(records) if "eval/valid/lm_loss" in record)
    losses = [last[f"eval/valid/lm_loss/{source}"] for source in ("valid", "train")]
    assert last["eval/valid/lm_loss"] == pytest.approx(0.75 * losses[0] + 0.25 * losses[1])
    assert losses[0] != losses[1]
    assert [record["eval/test/lm_loss"] for record in records if "eval/test/lm_loss" in record] == [losses[0]]


def test_a_seed_that_would_reorder_the_data_is_refused(finished):
    folder, _ = finished
    done = run(folder, "training.seed=1", check=False)
    assert done.returncode != 0
    assert "would order the samples anew, repeating some and skipping others." in done.stderr
    assert "Use training.seed=1234 (it is 1)." in done.stderr


def test_a_torn_checkpoint_is_passed_over_and_named(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "tiny" / "checkpoints" / "step_20" / ".metadata").unlink()
    done = run(tmp_path)
    assert "step_20 is not a complete checkpoint; continuing from step_10." in done.stderr
    steps = [line.split("/")[0] for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [int(step.removeprefix("step ")) for step in steps] == list(range(11, 21))
    records = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    before = read_metrics(folder / "runs" / "tiny" / "metrics.jsonl")

    def losses(found):
        return [(record["step"], record["train/lm_loss"]) for record in found if "train/lm_loss" in record]

    assert losses(records) == losses(before)


def test_a_model_that_does_not_fit_the_checkpoint_is_named(finished):
    folder, _ = finished
    done = run(folder, "moe.shared_hidden_size=8", check=False)
    assert done.returncode != 0
    assert (
        "step_20 does not fit the model. It lacks model.decoder.layers.1.mlp.shared_experts.linear_fc1.weight, "
        "model.decoder.layers.1.mlp.shared_experts.linear_fc2.weight; it has nothing besides; of other shape: nothing."
    ) in done.stderr
    done = run(folder, "model.vocab_size=384", check=False)
    assert "of other shape: model.embedding.word_embeddings.weight is (320, 32) and not (384, 32)" in done.stderr


def test_a_small_vocabulary_is_refused(finished):
    folder, _ = finished
    done = run(folder, "run.name=other", "model.vocab_size=100", check=False)
    assert "model.vocab_size (100) is smaller than the vocabulary of runs/data/builtin/train (257)." in done.stderr


def test_keys_of_a_checkpoint_are_those_that_were_frozen(finished):
    """Names and global shapes: renaming one makes every checkpoint of a user unreadable."""
    from megatron.core import dist_checkpointing

    from msa_pretrain.model.parallel import distributed

    folder, _ = finished
    with distributed():
        stored = dist_checkpointing.load_tensors_metadata(str(folder / "runs" / "tiny" / "checkpoints" / "step_20"))
    shapes = {key: list(value.global_shape) for key, value in stored.items()}
    model = {key: shape for key, shape in shapes.items() if key.startswith("model.")}
    assert model == json.loads((GOLDEN / "checkpoint_keys.json").read_text())
    trained = {key for key in model if not key.endswith("expert_bias")}
    assert set(shapes) == set(model) | {
        f"optimizer.state.{state}.{key}" for state in ("param", "exp_avg", "exp_avg_sq") for key in trained
    }


def test_losses_are_those_that_were_frozen(finished):
    """A change that moves them says so in its commit. Other processors round differently, hence the 1e-3."""
    folder, _ = finished
    records = [r for r in read_metrics(folder / "runs" / "tiny" / "metrics.jsonl") if "train/lm_loss" in r]
    golden = json.loads((GOLDEN / "tiny_run.json").read_text())
    for name, expected in golden.items():
        assert [record[name] for record in records[: len(expected)]] == pytest.approx(expected, rel=1e-3), name
