"""A new run from an imported checkpoint: the loss that the weights promise, in every layout, and MSA beside it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_module

from msa_pretrain.data.prepare import write_indexed_dataset
from msa_pretrain.scripts.convert import main
from msa_pretrain.training.checkpoint import CheckpointError
from msa_pretrain.training.config import load_config
from msa_pretrain.training.conversion.importing import plan_import, run_import
from msa_pretrain.training.launch import train

SHORT = [
    "experiment=cpu_smoke",
    "model=imported",
    "moe=imported",
    "attention=dense",
    "training.seq_length=48",
    "training.micro_batch_size=1",
    "training.global_batch_size=2",
    "training.total_tokens=96",
    "training.warmup_tokens=0",
    "training.precision=fp32",
    "training.eval_every=1",
    "training.eval_samples=4",
    "training.num_threads=1",
    "optim.lr=1e-4",
    "optim.min_lr=1e-4",
    "optim.indexer_lr=1e-4",
    "optim.lr_warmup_tokens=0",
    "tracking.wandb='off'",
]


@pytest.fixture
def data(tmp_path):
    """Four documents of 49 tokens: a sample and one label each."""
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(3, 100, (49,), generator=generator).tolist() for _ in range(40)]
    write_indexed_dataset(
        ((f"doc{n}", document[:-1]) for n, document in enumerate(documents)),
        tmp_path / "data",
        vocab_size=101,
        eod_id=100,
    )
    return [f"data.train=[{tmp_path}/data]", f"data.valid=[{tmp_path}/data]", f"data.cache_dir={tmp_path}/cache"]


def start(checkpoint, data, name, *overrides):
    """Loss on the validation set before the first step."""
    folder = checkpoint.parent
    where = [f"training.init_from={checkpoint}", f"run.dir={folder}", f"run.name={name}"]
    search = [f"hydra.searchpath=[file://{checkpoint}/configs]"]
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        config = load_config(compose("pretrain", [*search, *SHORT, *where, *data, *overrides]), world_size=1)
    train(config, overrides=[])
    return first_loss(folder / name)


def first_loss(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(record["eval/valid/lm_loss"] for record in records if record["step"] == 0)


def test_msa_beside_an_imported_model_changes_nothing_until_it_selects(saved, data, tmp_path):
    """T6.7: only index weights are made, and with all blocks kept the loss is the dense one; with fewer it is not."""
    checkpoint = run_import(plan_import(saved("qwen3_moe"), vocab_multiple=64), tmp_path / "checkpoint")
    dense = start(checkpoint, data, "dense")
    msa = ["attention=msa", "attention.index_dim=16", "attention.indexer_init=from_attention", "attention.block_size=8"]
    assert start(checkpoint, data, "all", *msa, "attention.top_k=6") == pytest.approx(dense, rel=1e-6)
    assert abs(start(checkpoint, data, "few", *msa, "attention.top_k=1") / dense - 1) > 1e-3
    log = (tmp_path / "dense" / "logs" / "rank_0.log").read_text()
    assert f"starting from the weights of {checkpoint}, with all weights" in log
    # an optimizer is what the checkpoint lacks
    with pytest.raises(CheckpointError, match=r"holds weights alone.*Use training\.init_from"):
        start(checkpoint, data, "resumed", "training.init_from=''", f"training.resume={checkpoint}")
    with pytest.raises(CheckpointError, match=r"has no optimizer for training\.init_optimizer=keep: an imported one"):
        start(checkpoint, data, "kept", "training.init_optimizer=keep")


@pytest.mark.layouts
@pytest.mark.parametrize(
    "layout", [["parallel.expert=2"], ["parallel.tensor=2", "parallel.sequence=true"]], ids=["expert", "tensor"]
)
def test_an_imported_checkpoint_loads_under_every_layout(saved, data, tmp_path, layout):
    """By the command that the import prints; 101 tokens padded to 104."""
    checkpoint = tmp_path / "checkpoint"
    main(["import", "--from", str(saved("minimax_m2")), "--to", str(checkpoint), "--vocab-multiple", "8"])
    alone = start(checkpoint, data, "alone")
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    where = [f"training.init_from={checkpoint}", f"run.dir={tmp_path}", "run.name=two"]
    command = ["-m", "msa_pretrain.scripts.pretrain", "--config-dir", f"{checkpoint}/configs"]
    done = subprocess.run(
        [*torchrun, *command, *SHORT, *where, *data, *layout],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
    assert first_loss(tmp_path / "two") == pytest.approx(alone, rel=1e-5)
