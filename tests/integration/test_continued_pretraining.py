"""Dense pretraining, then MSA from its checkpoint: the trainer's way through `training.init_from`."""

import json

import numpy as np
import pytest
import torch

from msa_pretrain.data.prepare import write_indexed_dataset
from msa_pretrain.model.parallel import distributed, model_parallel
from msa_pretrain.training.optim import clip_group, release
from msa_pretrain.training.run_folder import RunFolder
from msa_pretrain.training.trainer import Trainer

DENSE = ["run.name=dense", "attention.kind=dense", "training.warmup_tokens=0", "training.total_tokens=80"]
MSA = ["run.name=msa", "attention.index_dim=8", "training.total_tokens=160", "training.warmup_tokens=80"]


@pytest.fixture
def train(tmp_path, tiny_config, monkeypatch):
    """Runs a config to its end in `tmp_path`; returns the trainer and its records."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    documents = [(f"doc{n}", generator.integers(0, 39, generator.integers(5, 40)).tolist()) for n in range(30)]
    write_indexed_dataset(iter(documents), tmp_path / "data", vocab_size=40, eod_id=39)

    def run(*overrides):
        config = tiny_config("data.train=[data]", "data.valid=[data]", "training.eval_every=9", *overrides)
        folder = RunFolder(config)
        with model_parallel(config.parallel, config.training.seed):
            folder.prepare(config, [])
            trainer = Trainer(config, folder)
            trainers.append(trainer)
            trainer.run()
        return trainer, [json.loads(line) for line in folder.metrics.read_text().splitlines()]

    trainers: list[Trainer] = []
    with distributed():
        yield run
        release(chunk for trainer in trainers for chunk in trainer.chunks)
    torch.use_deterministic_algorithms(False)


def steps_of(trainer):
    return {clip_group(group): group["step"] for group in trainer.optimizer.param_groups}


@pytest.mark.parametrize("indexer_init, optimizer", [("random", "reset"), ("from_attention", "keep")])
def test_the_warm_up_starts_at_the_loss_where_the_dense_run_ended(train, indexer_init, optimizer, caplog):
    """Full attention is the same with and without an index branch, so the validation loss is the same number."""
    dense, before = train(*DENSE)
    (source,) = (path for path in dense.folder.checkpoints.iterdir() if path.is_dir())
    overrides = [*MSA, f"attention.indexer_init={indexer_init}", "training.init_from=runs/dense/checkpoints"]
    overrides.append(f"training.init_optimizer={optimizer}")
    with caplog.at_level("INFO"):
        msa, after = train(*overrides)
    made = f"with an index branch made by {indexer_init}"
    assert f"starting from the weights of runs/dense/checkpoints/{source.name}, {made}" in caplog.text
    said = {
        "reset": "optimizer reset: all moments",
        "keep": f"checkpoints/{source.name} at Adam step 2, index parameters new",
    }
    assert said[optimizer] in caplog.text
    losses = [[r["eval/valid/lm_loss"] for r in records if "eval/valid/lm_loss" in r] for records in (before, after)]
    assert losses[1][0] == losses[0][-1] != losses[0][0]
    assert (
        after[0]["step"] == 0
        and [r["train/phase"] for r in after if "train/phase" in r] == ["warmup"] * 2 + ["sparse"] * 2
    )
    assert after[-1]["consumed_tokens"] == 160  # a run of its own: no token of the dense run counts
    steps = {"backbone": {"reset": 4, "keep": 6}[optimizer], "indexer": 4}
    assert steps_of(msa) == steps
    # started again, the run goes on from its own checkpoint: the weights are not thrown away (case 1.16)
    weights = dict(msa.chunks[0].module.named_parameters())
    again, _ = train(*overrides)
    assert again.state.step == 4 and steps_of(again) == steps
    assert all(torch.equal(weight, weights[name]) for name, weight in again.chunks[0].module.named_parameters())
