"""How dense_attention cuts a batch into library calls, and what backend "triton" does where there is no such kernel."""

import pytest
import torch

from msa_pretrain.kernels import Segments, dense_attention
from msa_pretrain.kernels.dense_causal_attention.library import plan_runs

# A document of 1,024 tokens between short ones, an empty one, then a fragment and a nested range of another document.
SEGMENTS = Segments(
    ((0, 3, 0, 3), (3, 5, 3, 5), (8, 1024, 8, 1024), (1032, 0, 1032, 0), (1032, 4, 1032, 9), (1040, 1024, 1032, 2000)),
    2064,
    3032,
)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_fragment_is_in_one_run(deterministic):
    runs, borders = plan_runs(SEGMENTS, deterministic)
    found = []
    for run in runs:
        count = run.num_fragments + 1
        q_borders = borders[run.borders : run.borders + count]
        k_borders = borders[run.borders + count : run.borders + 2 * count]
        assert (q_borders[-1], k_borders[-1]) == (run.q_len, run.k_len)
        rows = [
            (run.q_start + q, q_next - q, run.k_start + k, k_next - k)
            for q, q_next, k, k_next in zip(q_borders, q_borders[1:], k_borders, k_borders[1:], strict=False)
        ]
        assert run.max_q == max(row[1] for row in rows) and run.max_k == max(row[3] for row in rows)
        found += rows
    assert found == [row for row in SEGMENTS.rows if row[1]]


def test_cudnn_takes_whole_documents_of_listed_lengths_only():
    runs, _ = plan_runs(SEGMENTS, deterministic=False)
    assert [(run.cudnn, run.num_fragments) for run in runs] == [(False, 2), (True, 1), (False, 1), (False, 1)]
    runs, _ = plan_runs(SEGMENTS, deterministic=True)
    assert [(run.cudnn, run.num_fragments) for run in runs] == [(False, 4), (False, 1)]


def test_on_the_cpu_it_computes_as_the_reference():
    x = [torch.randn(20, heads, 16) for heads in (4, 2, 2)]
    segments = Segments.from_cu_seqlens([0, 7, 20])
    ours, theirs = (dense_attention(*x, segments, backend=backend) for backend in ("triton", "reference"))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
