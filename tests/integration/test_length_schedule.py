"""Samples that grow during a run: what each step is fed, phases by tokens, and restarts across the border."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from msa_pretrain.data.prepare import write_indexed_dataset
from msa_pretrain.model.parallel import distributed, model_parallel
from msa_pretrain.training.config import to_dict, to_yaml
from msa_pretrain.training.optim import release
from msa_pretrain.training.run_folder import RunFolder
from msa_pretrain.training.trainer import Trainer

# 4 steps of 2 x 20 tokens, 4 of 1 x 40, 2 of 2 x 60; the warm-up of 200 tokens ends within the second length
GROWING = [
    "training.total_tokens=560",
    "training.warmup_tokens=200",
    "training.length_schedule=[{from_tokens:160,seq_length:40,micro_batch_size:1,global_batch_size:1,eval_samples:1},"
    "{from_tokens:320,seq_length:60,micro_batch_size:2,global_batch_size:2,eval_samples:2}]",
    "data.train=[data:0.7,more:0.3]",
    "data.train_schedule=[{from_tokens:200,blend:[more]}]",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=20",
]


@pytest.fixture
def train(tmp_path, tiny_config, monkeypatch):
    """Runs a config in `tmp_path`; returns the trainer, its records and the tokens of each step."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for name in ("data", "more"):
        documents = [(f"{n}", generator.integers(0, 39, generator.integers(5, 90)).tolist()) for n in range(30)]
        write_indexed_dataset(iter(documents), tmp_path / name, vocab_size=40, eod_id=39)

    def run(*overrides):
        config = tiny_config("data.valid=[data]", "training.eval_every=4", *overrides)
        folder, fed = RunFolder(config), {}
        with model_parallel(config.parallel, config.training.seed):
            folder.prepare(config, [])
            trainer = Trainer(config, folder)
            trainers.append(trainer)
            step = trainer._train_step

            def recorded(batches, phase):
                step(batches, phase)
                fed[trainer.state.step] = [batch.tokens.tolist() for batch in batches]

            trainer._train_step = recorded
            trainer.run()
        return trainer, [json.loads(line) for line in folder.metrics.read_text().splitlines()], fed

    trainers: list[Trainer] = []
    with distributed():
        yield run
        release(chunk for trainer in trainers for chunk in trainer.chunks)
    torch.use_deterministic_algorithms(False)


def losses(records):
    return [(r["step"], r["train/lm_loss"], r["indexer/kl"]) for r in records if "train/lm_loss" in r]


def test_a_run_of_growing_samples_and_its_restarts(train, tmp_path):
    whole, records, fed = train(*GROWING)
    steps = [record for record in records if "train/lm_loss" in record]
    assert [len(batches) for batches in fed.values()] == [2] * 4 + [1] * 6
    assert [len(batches[0][0]) for batches in fed.values()] == [20] * 4 + [40] * 4 + [120] * 2
    assert [r["train/seq_length"] for r in steps] == [20] * 4 + [40] * 4 + [60] * 2
    assert [r["consumed_tokens"] for r in steps] == [40, 80, 120, 160, 200, 240, 280, 320, 440, 560]
    assert [r["train/phase"] for r in steps] == ["warmup"] * 5 + ["sparse"] * 5
    assert [r["train/samples"] for r in steps] == [2, 4, 6, 8, 9, 10, 11, 12, 14, 16]
    assert [r["optim/lr"] for r in steps] == sorted((r["optim/lr"] for r in steps), reverse=True)
    # validated at each end of a stage with its length, and before the next with that one's
    assert [r["step"] for r in records if "eval/valid/lm_loss" in r] == [0, 4, 4, 5, 8, 8, 10]
    ends = [r["eval/valid/lm_loss"] for r in records if "eval/valid/lm_loss" in r and r["step"] == 4]
    assert ends[0] != ends[1]
    assert whole.total_steps == whole.state.step == 10
    drawn = whole.data.train.consumed(whole.state.consumed_samples)
    assert list(drawn.values()) == [6, 10]  # 70% of 9 samples, then the other source alone
    weights = dict(whole.chunks[0].module.named_parameters())
    # before a border, on it, and on the next one, where the samples so far come from a resumed run
    for number, cut in enumerate((3, 4, 8)):
        checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
        for step in range(cut + 1, 11):
            shutil.rmtree(checkpoints / f"step_{step}")
        (checkpoints / "latest").write_text(f"step_{cut}\n")
        again, resumed, seen = train(*GROWING, f"data.num_workers={number % 2}")
        assert seen == {step: batches for step, batches in fed.items() if step > cut}
        assert losses(resumed) == losses(records)
        for name, weight in again.chunks[0].module.named_parameters():
            assert torch.equal(weight, weights[name]), (cut, name)


def test_data_that_end_early_end_the_run_on_every_rank_with_one_message(tmp_path, tiny_config):
    """The last batches are missing: both ranks stop at the same step, one of them says why, the step is saved."""
    script = tmp_path / "run.py"
    script.write_text(SHORT)
    write_indexed_dataset(((str(n), [n % 39] * 50) for n in range(30)), tmp_path / "data", vocab_size=40, eod_id=39)
    config = tiny_config("data.train=[data]", "data.valid=[]", "training.eval_every=0", "training.eval_samples=0")
    (tmp_path / "config.yaml").write_text(to_yaml(to_dict(config)))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert (
        output.count("the training data are exhausted: 6 of 7 samples are consumed and the next step needs 2") == 1
    ), output
    assert "runs/tiny/checkpoints/step_3 holds the run so far." in output
    assert "DataExhaustedError" not in output
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "latest").read_text() == "step_3\n"
    assert (tmp_path / "ended").read_text() == "xx"


SHORT = """
def main():
    from omegaconf import OmegaConf
    from msa_pretrain.training import launch, trainer
    from msa_pretrain.training.config import load_config
    config = load_config(OmegaConf.load("config.yaml"), world_size=2)
    build = trainer.build_datasets

    def short(config):
        data = build(config)
        data.train._source_of = data.train._source_of[:7]
        return data

    trainer.build_datasets = short
    try:
        launch.train(config, [])
    except SystemExit:
        with open("ended", "a") as file:
            file.write("x")
        raise

if __name__ == "__main__":
    main()
"""
