"""`scripts/save_selections.py`: the blocks that it writes are those that the layer attended to."""

from contextlib import ExitStack

import pytest
import torch

from msa_pretrain.data.indexed import open_indexed_dataset
from msa_pretrain.data.prepare import prepare_builtin_corpus
from msa_pretrain.model import attention
from msa_pretrain.model.gpt import build_model
from msa_pretrain.model.parallel import distributed, model_parallel
from msa_pretrain.scripts.save_selections import chosen_layer, describe, main
from msa_pretrain.training.checkpoint import TrainState, save_checkpoint
from msa_pretrain.training.config import to_dict, to_yaml
from msa_pretrain.training.optim import build_optimizer, release, wrap_with_ddp


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    prepare_builtin_corpus(folder, max_bytes=300_000)
    return folder


@pytest.fixture
def run_of(tiny_config, corpus, tmp_path):
    """Makes a run folder with a checkpoint of random weights."""

    def build(*overrides: str):
        data = [f"data.train=[{corpus}/train]", f"data.valid=[{corpus}/valid:2.0]"]
        config = tiny_config("model.vocab_size=320", *data, *overrides)
        with ExitStack() as stack:
            stack.enter_context(distributed())
            stack.enter_context(model_parallel(config.parallel, seed=1))
            chunks = wrap_with_ddp(build_model(config.spec, config.training.seq_length))
            save_checkpoint(
                tmp_path / "run" / "checkpoints",
                chunks,
                build_optimizer(chunks, config.spec, config.optim),
                TrainState(step=3),
                phase="sparse",
                data_record={},
                config_yaml=to_yaml(to_dict(config)),
                wandb_run_id=None,
                keep_last=1,
            )
            release(chunks)
        return tmp_path / "run"

    return build


@pytest.fixture
def used(monkeypatch):
    """By MSA layer: the blocks that it attended to."""
    used, attend = [], attention.sparse_attention

    def keep(query, key, value, block_indices, *others, **options):
        used.append(block_indices.clone())
        return attend(query, key, value, block_indices, *others, **options)

    monkeypatch.setattr(attention, "sparse_attention", keep)
    return used


def test_the_saved_blocks_are_those_of_the_layer(run_of, corpus, tmp_path, used, capsys):
    run = run_of("attention.init_blocks=1", "attention.top_k=4", "model.num_layers=3", "attention.full_layers=[2]")
    options = ["--tokens", "300", "--output", str(tmp_path / "out" / "ids.pt")]
    main(["--checkpoint", str(run), *options])
    saved = torch.load(tmp_path / "out" / "ids.pt")
    assert saved.dtype == torch.int32 and saved.shape == (300, 3, 4)
    first, last = used
    assert torch.equal(saved, last) and not torch.equal(saved, first)
    assert "layer 1 of" in capsys.readouterr().out
    main(["--checkpoint", str(run / "checkpoints" / "step_3"), "--layer", "0", *options])
    assert torch.equal(torch.load(tmp_path / "out" / "ids.pt"), first)
    # other text, other blocks: the first document was of the validation data
    main(["--checkpoint", str(run), "--data", f"{corpus}/train", *options])
    assert not torch.equal(torch.load(tmp_path / "out" / "ids.pt"), last)


def test_what_cannot_be_saved_is_refused(run_of, corpus, tmp_path):
    run = run_of("attention.full_layers=[0]")

    def refused(run, *options: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["--checkpoint", str(run), "--tokens", "30", "--output", str(tmp_path / "ids.pt"), *options])
        assert not (tmp_path / "ids.pt").exists()
        return str(stopped.value)

    assert "no run with one. Correct --checkpoint." in refused(tmp_path)
    assert "--layer 0 is no MSA layer. Use one of [1]." in refused(run, "--layer", "0")
    longest = open_indexed_dataset(corpus / "valid")[1].longest_document
    for number in (0, longest + 1):
        message = refused(run, "--tokens", str(number))
        assert f"--tokens {number}: the longest document of {corpus}/valid has {longest}." in message


def test_a_run_that_selects_nothing_is_refused(tiny_config):
    def run(phase: str, *overrides: str) -> dict[str, str]:
        return {"phase": phase, "config": to_yaml(to_dict(tiny_config(*overrides)))}

    assert chosen_layer(run("sparse"), None) == 1
    with pytest.raises(ValueError, match=r"is of the phase warmup, .* begins after training\.warmup_tokens"):
        chosen_layer(run("warmup"), None)
    with pytest.raises(ValueError, match="has no MSA layer: its attention is dense"):
        chosen_layer(run("dense", "attention.kind=dense", "training.warmup_tokens=0"), None)


def test_agreement_of_neighbours():
    """Blocks of 1 token, 2 kept: rows from the third on choose. Shared with the row before: 1 of 2, 2 of 2, 0 of 2."""
    ids = torch.tensor([[0, -1], [0, 1], [0, 2], [0, 3], [0, 3], [2, 4]], dtype=torch.int32)[:, None]
    assert "4 queries choose; one has 50.0% of its blocks" in describe(ids, block_size=1)
    alternating = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).repeat(65, 1)[:, None]
    assert "0.0% of its blocks in common with the one before, 128 neighbours keep 4.0" in describe(alternating, 1)
    assert "there is nothing to choose" in describe(ids[:2], block_size=1)
