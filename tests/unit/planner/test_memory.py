"""Peaks: the measured one, hand arithmetic, and what must grow or shrink."""

import json
from pathlib import Path

import pytest

from msa_pretrain.model.config import Phase
from msa_pretrain.training.planner.activations import Activations
from msa_pretrain.training.planner.memory import GIB, fullest, stage_peaks
from msa_pretrain.training.planner.search import phase_steps

T, H = 8192, 3072
RESULTS = Path(__file__).parents[3] / "docs" / "results"


def peak(config, world_size, layout_of, **parallel):
    spec, layout, load = layout_of(config, world_size, **parallel)
    return fullest(spec, layout, load, list(phase_steps(config)))


def test_the_measured_run_of_gpu_debug(config_of, layout_of):
    """docs/results/gpu_training.json: `torch.cuda.max_memory_allocated` over 50 steps of both phases."""
    measured = max(
        json.loads((RESULTS / "gpu_training.json").read_text())["series"]["gpu_debug_bf16_triton"]["memory/peak_gib"]
    )
    predicted = peak(config_of(experiment="gpu_debug"), 1, layout_of)
    assert predicted.total / GIB == pytest.approx(measured, rel=0.08)
    assert predicted.low / GIB < measured < predicted.high / GIB


@pytest.mark.parametrize("number", range(6))
def test_measured_runs_of_32k_tokens(config_of, layout_of, number):
    """docs/results/memory.json: three phases, without and with full recompute, each within 8%."""
    row = json.loads((RESULTS / "memory.json").read_text())["rows"][number]
    total, phase = 4 * 2 * 32768, row["phase"]
    overrides = [
        *(["attention=dense"] if phase == "dense" else []),
        *("training.seq_length=32768", "training.micro_batch_size=1", "training.global_batch_size=2"),
        f"training.recompute={row['recompute']}",
        f"training.total_tokens={total}",
        f"training.warmup_tokens={total if phase == 'warmup' else 0}",
        "optim.lr_warmup_tokens=0",
    ]
    predicted = peak(config_of(*overrides, experiment="gpu_debug"), 1, layout_of)
    assert predicted.total / GIB == pytest.approx(row["measured_gib"], rel=0.08)


def test_layer_of_the_mission_by_hand(config_of, layout_of):
    spec, layout, load = layout_of(config_of("training.recompute=none"), 512)
    a = Activations(spec, layout, load.tokens(spec), Phase.sparse)
    # bf16 unless said; norms keep input and fp32 scale; 48 + 8 + 8 heads of 128 leave the QKV linear
    attention = 2 * T * H + 4 * T + 2 * T * H + 2 * T * 64 * 128
    # copies of query and key for the full-vector norms, rotated query and key, output, lse
    attention += 2 * (2 * T * 56 * 128) + 8 * T + 2 * T * 48 * 128 + 4 * T * 48
    # index queries and key before and after the norm, ids of 16 blocks, the student's lse
    index = 2 * (2 * T * 9 * 128) + 4 * T * 9 + 4 * T * 8 * 16 + 4 * T * 8
    assert sum(a.attention(5).values()) == attention + index
    # the router's fp32 input and scores; permutation; 8 rows a token of input, gate and up, three of the hidden size
    rows = 8 * T
    moe = 4 * T * H + T * 256 * 9 + 8 * T + T * 256 * 5 + 8 * rows
    moe += 2 * rows * (H + 5 * 1536) + 4 * rows + 4 * 8
    assert sum(a.experts().values()) == moe
    assert sum(a.layer(5).values()) == attention + index + moe + 2 * T * H + 4 * T
    # the softmax in fp32 is what the head is about
    assert a.head()["softmax"] == 4 * T * 200064


def test_mtp_layer_of_the_mission_by_hand(config_of, layout_of):
    """A layer, three norms, the projection's inputs, and a second softmax with input, ids, targets, mask and loss."""
    spec, layout, load = layout_of(config_of("model.mtp_layers=1", "training.recompute=none"), 512)
    a = Activations(spec, layout, load.tokens(spec), Phase.sparse)
    head = 2 * T * H + 4 * T * 200064 + (9 + 8 + 4) * T + 4
    inside = sum(a.layer(61).values()) + 3 * (2 * T * H + 4 * T) + 2 * 2 * T * H
    assert sum(a.layer(62).values()) == inside + head
    full, layout, load = layout_of(config_of("model.mtp_layers=1", "training.recompute=full"), 512)
    again = Activations(full, layout, load.tokens(full), Phase.sparse)
    assert sum(again.kept(62).values()) == 2 * 2 * T * H + head
    # no layer of the decoder's, so the last stage alone is fuller, by the states too
    without = layout_of(config_of("training.recompute=none"), 512)
    plain, with_mtp = (stage_peaks(*which, Phase.sparse) for which in (without, (spec, layout, load)))
    assert [one.total for one in plain[:-1]] == [one.total for one in with_mtp[:-1]]
    assert with_mtp[-1].activations == plain[-1].activations + inside + head
    assert with_mtp[-1].states.total > plain[-1].states.total


def test_transformer_engine_takes_its_workspaces(config_of, layout_of):
    plain, engine = (
        peak(config_of(f"model.backend={name}"), 512, layout_of) for name in ("torch", "transformer_engine")
    )
    assert plain.during == engine.during == "head"
    assert engine.total - plain.total == engine.workspace - plain.workspace == 5 * (32 * 2**20 + 1024)


def test_recompute_keeps_less(config_of, layout_of):
    totals = {}
    for recompute in ("none", "selective", "full"):
        totals[recompute] = peak(config_of(f"training.recompute={recompute}"), 512, layout_of)
    assert totals["none"].activations > totals["selective"].activations > totals["full"].activations
    # stage 0 of 8 keeps 8 micro-batches of 7 layer inputs and its output
    kept = 8 * T * (2 * H * 8 + 36 + 8 * 64) + 32 * 28 * T
    spec, layout, load = layout_of(config_of("training.recompute=full"), 512)
    first = stage_peaks(spec, layout, load, Phase.sparse)[0]
    assert first.activations == kept and first.micro_batches == (8,)
    assert first.states.total <= totals["full"].states.total


def test_more_of_anything_takes_more_memory(config_of, layout_of):
    base = peak(config_of(), 512, layout_of)
    for override in ("training.micro_batch_size=2", "model.num_layers=126", "moe.expert_hidden_size=3072"):
        assert peak(config_of(override), 512, layout_of).total > base.total, override
    longer = config_of("training.seq_length=16384", "training.total_tokens=33554432000", "training.warmup_tokens=0",
                       "optim.lr_warmup_tokens=0")  # fmt: skip
    assert peak(longer, 512, layout_of).total > base.total
    assert base.low <= base.total <= base.high < base.needed


def test_parallelism_takes_less_of_a_gpu(config_of, layout_of):
    config = config_of("training.recompute=none")
    base = peak(config, 512, layout_of).total
    assert peak(config_of("training.recompute=none"), 512, layout_of, tensor=2, sequence=True).total < base
    assert peak(config_of("training.recompute=none", "parallel.expert=64"), 512, layout_of).total < base
    # half of the tokens, but the keys and values of all
    context = peak(config_of("training.recompute=none"), 512, layout_of, context=2)
    assert 0.5 * base < context.total < base


def test_keys_of_all_context_ranks_are_gathered(config_of, layout_of):
    spec, layout, load = layout_of(config_of(), 512, context=4)
    a = Activations(spec, layout, load.tokens(spec), Phase.sparse)
    saved = a.attention(0)
    assert a.tokens == T // 4
    assert saved["gathered key and value"] == 2 * 2 * T * 8 * 128 and saved["key"] == 0
    assert saved["index key"] == 2 * T * 128 and saved["index query"] == 2 * T // 4 * 8 * 128


def test_sequence_parallelism_shares_what_lies_between_the_linears(config_of, layout_of):
    spec, layout, load = layout_of(config_of(), 512, tensor=4, sequence=True)
    a = Activations(spec, layout, load.tokens(spec), Phase.sparse)
    saved = a.layer(0)
    assert saved["QKV input"] == 2 * T // 4 * H and saved["gathered index input"] == 2 * T * H
    assert saved["QKV output"] == 2 * T * (12 + 2 * 2) * 128 and saved["block ids"] == 4 * T * 2 * 16
    assert saved["expert input"] == 2 * 8 * T // 4 * H


def test_a_step_without_activations_peaks_in_the_optimizer(config_of, layout_of):
    config = config_of("training.seq_length=128", "training.total_tokens=262144", "training.warmup_tokens=0",
                       "optim.lr_warmup_tokens=0", "training.micro_batch_size=1", "parallel=single",
                       "model.num_layers=8", "training.global_batch_size=2048")  # fmt: skip
    assert peak(config, 1, layout_of).during == "optimizer"
