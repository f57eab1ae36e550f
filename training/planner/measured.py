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
        (64, 4): [(4096, 0.62), (8192, 1.55), (32768, 6.72), (131072, 27.66)],
        (48, 8): [(4096, 0.54), (8192, 1.53), (32768, 6.69), (131072, 28.66)],
    },
    "with_kl": {
        (64, 4): [(4096, 2.34), (8192, 5.0), (32768, 21.4), (131072, 96.42)],
        (48, 8): [(4096, 2.3), (8192, 5.16), (32768, 22.64), (131072, 100.75)],
    },
    "select": {
        (64, 4): [(8192, 0.26), (32768, 1.58), (65536, 4.73), (131072, 16.33)],
        (48, 8): [(8192, 0.36), (32768, 3.03), (65536, 8.96), (131072, 33.42)],
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
        (64, 4): [(8192, 7.6), (32768, 122.14), (131072, 1834.53)],
        (48, 8): [(8192, 5.86), (32768, 84.05), (131072, 1372.83)],
    },
    "dense_fwd_bwd deterministic": {
        (64, 4): [(8192, 16.87), (32768, 248.54)],
        (48, 8): [(8192, 15.6), (32768, 234.63)],
    },
    "warmup_fwd_bwd": {
        (64, 4): [(8192, 11.95), (32768, 180.31)],
        (48, 8): [(8192, 10.34), (32768, 158.92)],
    },
    "warmup_fwd_bwd deterministic": {
        (64, 4): [(8192, 21.1), (32768, 315.22)],
        (48, 8): [(8192, 20.48), (32768, 307.95)],
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
