"""Kernels' own memory against the peaks measured on an H200 (docs/results), and constants against the kernels'."""

import dataclasses
import json
from pathlib import Path

import pytest

from msa_pretrain.kernels.block_selection import launch as selection
from msa_pretrain.kernels.block_sparse_attention import launch as sparse
from msa_pretrain.kernels.indexer_loss import dense_gradient
from msa_pretrain.model.config import Phase
from msa_pretrain.training.planner import buffers
from msa_pretrain.training.planner.activations import Activations
from msa_pretrain.training.planner.measured import MILLISECONDS, kernel_ms
from msa_pretrain.training.planner.stages import Layout

RESULTS = Path(__file__).parents[3] / "docs" / "results"
SPARSE = json.loads((RESULTS / "kernels_run1.json").read_text())["rows"]
WARMUP = json.loads((RESULTS / "warmup.json").read_text())["rows"]
WARMUP_KL = json.loads((RESULTS / "warmup_kl.json").read_text())["rows"]


def activations(spec, heads, tokens, phase=Phase.sparse, deterministic=False):
    heads, groups = heads
    model = dataclasses.replace(spec.model, num_query_heads=heads, num_kv_heads=groups)
    spec = dataclasses.replace(spec, model=model)
    return Activations(spec, Layout(spec.parallel, 1), tokens, phase, deterministic=deterministic)


def test_constants_are_those_of_the_kernels():
    assert buffers.QUERY_CHUNK == sparse.QUERY_CHUNK
    assert buffers.SCORE_BUFFER_BYTES == 4 * selection.SCORE_BUFFER
    for name in ("DIFFERENCE_BYTES", "CHUNK_ROWS", "WINDOW_KEYS"):
        assert getattr(buffers, name) == getattr(dense_gradient, name)


# stage -> (arithmetic, whether output and lse are in the measured peak, tolerance)
STAGES = {
    "reverse_index": (lambda a: buffers.REVERSE_INDEX_PEAK * a.tokens * a.heads[1] * 16, False, 0.25),
    "sparse_fwd": (buffers.sparse_forward, True, 0.01),
    "sparse_fwd_bwd": (buffers.sparse_backward, True, 0.02),
    "with_kl": (lambda a: buffers.sparse_backward(a) + buffers.indexer_backward(a), True, 0.02),
    "dense_fwd_bwd": (buffers.dense_backward, True, 0.06),
}


@pytest.mark.parametrize("row", [row for row in SPARSE if row["stage"] in STAGES and row["n_tokens"] > 16384], ids=str)
def test_peaks_of_the_sparse_kernels(config_of, row):
    shape = tuple(map(int, row["heads"].split("/")))
    a = activations(config_of().spec, shape, row["n_tokens"])
    count, with_output, tolerance = STAGES[row["stage"]]
    output = a.tokens * shape[0] * (2 * 128 + 4) if with_output else 0
    assert (count(a) + output) / 2**30 == pytest.approx(row["peak_gib"], rel=tolerance)


@pytest.mark.parametrize("row", WARMUP, ids=str)
def test_peak_of_the_warmup(config_of, row):
    """In that run the KL was an op of its own: the attention's peak, with output, lse, student and unit gradient."""
    a = activations(config_of().spec, (row["heads"], row["g"]), row["n_tokens"], Phase.dense, row["deterministic"])
    kept = a.attention(0)
    kept = kept["output"] + kept["lse"] + (8 + 4 * 128) * row["n_tokens"] * row["g"]
    assert (buffers.dense_backward(a) + kept) / 2**30 == pytest.approx(row["peak_gib"], rel=0.08)


def test_the_score_gradient_of_the_warmup(config_of):
    """At most 1 GiB beside the gradients; past one window of keys with sums of the query gradient."""
    spec = config_of().spec
    for power, difference, sums in ((13, 2 * 4 * 2**26, 0), (14, 2**30, 0), (15, 2**30, 4), (20, 2**30, 4)):
        a = activations(spec, (64, 4), 2**power, Phase.warmup)
        rows = (2 + 2 + 4 + sums) * 4 * a.tokens * 128 + 24 * 4 * a.tokens
        assert buffers.full_sequence_kl(a) == rows + difference


def test_times_are_the_measured_ones():
    rows = {(row["stage"], *map(int, row["heads"].split("/")), row["n_tokens"]): row["ms"] for row in SPARSE}
    for row in WARMUP:
        kind = " deterministic" if row["deterministic"] else ""
        rows["dense_fwd" + kind, row["heads"], row["g"], row["n_tokens"]] = row["dense_fwd_ms"]
    for row in WARMUP_KL:
        place, kind = (row["n"], row["g"], row["n_tokens"]), " deterministic" if row["deterministic"] else ""
        rows["dense_fwd_bwd" + kind, *place] = row["dense_fwd_bwd_ms"]
        rows["warmup_fwd_bwd" + kind, *place] = row["ms"]
    for op, shapes in MILLISECONDS.items():
        for shape, points in shapes.items():
            assert points == [(tokens, round(rows[op, *shape, tokens], 2)) for tokens, _ in points], op
            assert len(points) >= 2


@pytest.mark.parametrize("op", MILLISECONDS)
def test_a_measured_shape_lies_in_its_range(op):
    for shape, points in MILLISECONDS[op].items():
        for tokens, ms in points:
            time = kernel_ms(op, *shape, 128, (tokens,), block_size=128, top_k=16)
            assert time.low <= ms <= time.high


def test_times_grow_with_the_document_and_two_cost_twice():
    sizes = dict(block_size=128, top_k=16)
    times = [kernel_ms("with_kl", 48, 8, 128, (2**power,), **sizes).middle for power in range(13, 21)]
    assert times == sorted(times)
    # past the measured lengths a rate stays what it is: the kept pairs grow in proportion
    assert times[-1] / times[-2] == pytest.approx(2, rel=0.01)
    one, two = (kernel_ms("select", 48, 8, 128, (65536,) * count, **sizes).middle for count in (1, 2))
    assert two == pytest.approx(2 * one)
