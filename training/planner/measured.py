"""Kernel times on one NVIDIA H200, as docs/results records them (a test compares), and what follows for other shapes.

torch 2.11.0+cu130, Triton 3.6.0, cuDNN 9.19; bf16, head and index dim 128, blocks of 128, 16 kept, one document.
"""

import math
from functools import cache
from itertools import pairwise

from ...model.flops import kept_pairs, visible_pairs
from .ranges import Range

Shape = tuple[int, int]
"""Query heads, KV groups."""

# Operation -> shape -> (tokens, ms). `with_kl` is sparse attention forward and backward with the KL, `warmup` dense
# attention with the full-sequence KL. docs/results/kernels_run1.json: sparse_fwd, with_kl, select. warmup_kl.json:
# dense forward and backward, warmup. warmup.json: dense forward.
MILLISECONDS: dict[str, dict[Shape, list[tuple[int, float]]]] = {
    "sparse_fwd": {
        (64, 4): [(4096, 0.63), (8192, 1.55), (32768, 6.71), (131072, 27.66)],
        (48, 8): [(4096, 0.54), (8192, 1.53), (32768, 6.83), (131072, 28.07)],
    },
    "with_kl": {
        (64, 4): [(4096, 2.34), (8192, 4.99), (32768, 21.2), (131072, 90.84)],
        (48, 8): [(4096, 2.31), (8192, 5.17), (32768, 22.44), (131072, 98.59)],
    },
    "select": {
        (64, 4): [(8192, 0.26), (32768, 1.47), (65536, 4.79), (131072, 16.38)],
        (48, 8): [(8192, 0.36), (32768, 2.85), (65536, 9.06), (131072, 31.77)],
    },
    "dense_fwd": {
        (64, 4): [(8192, 2.0), (32768, 29.27)],
        (48, 8): [(8192, 1.5), (32768, 22.01)],
    },
    "dense_fwd deterministic": {
        (64, 4): [(8192, 3.44), (32768, 49.62)],
        (48, 8): [(8192, 2.63), (32768, 37.53)],
    },
    "dense_fwd_bwd": {
        (64, 4): [(8192, 7.02), (32768, 121.95), (131072, 1822.0)],
        (48, 8): [(8192, 5.87), (32768, 84.54), (131072, 1367.49)],
    },
    "dense_fwd_bwd deterministic": {
        (64, 4): [(8192, 16.71), (32768, 249.97)],
        (48, 8): [(8192, 15.61), (32768, 235.64)],
    },
    "warmup_fwd_bwd": {
        (64, 4): [(8192, 8.65), (32768, 138.12), (131072, 2226.4)],
        (48, 8): [(8192, 7.19), (32768, 117.94), (131072, 1833.13)],
    },
    "warmup_fwd_bwd deterministic": {
        (64, 4): [(8192, 18.54), (32768, 274.66)],
        (48, 8): [(8192, 17.76), (32768, 265.09)],
    },
}

SPARSE = ("sparse_fwd", "with_kl")
HEAD_DIM, BLOCK_SIZE, TOP_K = 128, 128, 16
SPREAD = Range(0.9, 1.1)
"""Runs of one kernel on one machine differ by a few percent; real selections are less even than random ones."""

# docs/results/gpu_training.md: gpu_debug, 0.49 and 0.63 s a step of 4 micro-batches x 8 layers, where launches and not
# the GPU took the time ("At this size the step is bound by launches"). The lower ends are a guess at fewer launches,
# and dense is one at the warm-up without its KL.
LAYER_LAUNCH_MS = {"dense": Range(6.0, 13.0), "warmup": Range(7.5, 15.3), "sparse": Range(10.0, 19.7)}


@cache
def kernel_ms(
    op: str, heads: int, groups: int, dim: int, lengths: tuple[int, ...], *, block_size: int, top_k: int
) -> Range:
    """Time of `op` on documents of these lengths, by the rates of the measured shapes (the slower and the faster).

    Work is (query, key) pairs x heads x dim, pairs being those that the operation visits; the rate is that of the
    measured number of tokens nearest in the logarithm, between two by interpolation, outside of them the nearest.
    """
    count = heads if op != "select" else groups
    per_pair = count * dim
    if op in SPARSE:
        work, tokens = per_pair * sum(kept_pairs(length, block_size, top_k) for length in lengths), sum(lengths)
    else:
        work, tokens = per_pair * sum(map(visible_pairs, lengths)), max(lengths)
    times = [work * _ms_per_work(op, shape, tokens) for shape in MILLISECONDS[op]]
    return Range(min(times), max(times)) * SPREAD


def _ms_per_work(op: str, shape: Shape, tokens: int) -> float:
    points = []
    for length, ms in MILLISECONDS[op][shape]:
        sparse = op in SPARSE
        pairs = kept_pairs(length, BLOCK_SIZE, TOP_K) if sparse else visible_pairs(length)
        points.append(
            (math.log(length), math.log(ms / (pairs * (shape[1] if op == "select" else shape[0]) * HEAD_DIM)))
        )
    at = min(max(math.log(tokens), points[0][0]), points[-1][0])
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return math.exp(low + (high - low) * (at - left) / (right - left))
    return math.exp(points[-1][1])
