"""Every op over a covering array of what it supports: each pair of values of two factors meets in some case.

Cases of bf16 need a GPU. There, sizes are as written; the interpreter gets 150 tokens a document and 2 groups at most.
"""

import itertools
import math
import random

import pytest
import torch

from msa_pretrain.kernels import (
    Segments,
    decode_attention,
    dense_attention,
    dense_indexer_kl,
    select_blocks,
    sparse_attention,
    sparse_indexer_kl,
)

# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

FACTORS = {
    "dtype": ["bf16", "fp16", "fp32"],
    "head_dim": [64, 128],
    "index_dim": [64, 128],
    "block_size": [64, 128],
    "k": [1, 3, 8, 16, 32],
    "heads": [1, 2, 3, 5, 6, 8, 11, 16],
    "groups": [1, 2, 4],
    "lengths": [(0, 1, 15), (16, 17, 127), (128, 0, 129), (507,), (1021, 1)],
    "layout": ["contiguous", "fused", "strided"],
    "grad": ["contiguous", "stride 0", "strided"],
    "fragment": [False, True],
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST = 1021 if DEVICE == "cuda" else 150
# Relative error in the Euclidean norm against float64; measured, at most: see docs/results/sparse_kernels_tests.md.
LIMITS = {"bf16": 6e-3, "fp16": 1e-3, "fp32": 3e-6}


def pairs_of(case):
    return set(itertools.combinations(case.items(), 2))


def covering_array():
    """Cases, greedily: each starts with a pair not met yet and takes the values that meet the most others."""
    names = list(FACTORS)
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(names, 2)
        for a, b in itertools.product(FACTORS[one], FACTORS[other])
    }
    generator, cases = random.Random(0), []
    while missing:
        best = {}
        for _ in range(20):
            case = dict(generator.choice(sorted(missing, key=str)))
            for name in generator.sample(names, len(names)):
                if name not in case:
                    gains = {
                        value: sum(
                            tuple(sorted([(name, value), item], key=lambda pair: names.index(pair[0]))) in missing
                            for item in case.items()
                        )
                        for value in FACTORS[name]
                    }
                    case[name] = max(gains, key=gains.get)
            case = {name: case[name] for name in names}
            if len(pairs_of(case) & missing) > len(pairs_of(best) & missing):
                best = case
        missing -= pairs_of(best)
        cases.append(best)
    return cases


CASES = covering_array()


def test_the_array_covers_every_pair_in_at_most_60_cases():
    met = set().union(*map(pairs_of, CASES))
    for one, other in itertools.combinations(FACTORS, 2):
        for a, b in itertools.product(FACTORS[one], FACTORS[other]):
            assert ((one, a), (other, b)) in met
    assert len(CASES) <= 60


def segments_of(case):
    """Packed documents with padding behind; as fragments, only the second half of each document has queries."""
    lengths = [min(length, LONGEST) for length in case["lengths"]]
    borders = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    if not case["fragment"]:
        return Segments.from_cu_seqlens(borders, borders[-1] + 3)
    rows, start = [], 2
    for k_start, length in zip(borders, lengths, strict=False):
        rows.append((start, -(-length // 2), k_start, length))
        start += -(-length // 2)
    return Segments(tuple(rows), start + 1, borders[-1] + 3)


def laid_out(tensors, layout):
    """The same numbers as dense tensors, as slices of one fused tensor, or with a last dimension that is not dense."""
    if layout == "contiguous":
        return [tensor.clone() for tensor in tensors]
    if layout == "strided":
        return [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in tensors]
    pieces = {}
    for rows in {len(tensor) for tensor in tensors}:
        group = [number for number, tensor in enumerate(tensors) if len(tensor) == rows]
        fused = torch.cat([tensors[number].flatten(1) for number in group], dim=1)
        split = fused.split([tensors[number][:1].numel() for number in group], dim=1)
        pieces |= {number: part.view(tensors[number].shape) for number, part in zip(group, split, strict=True)}
    return [pieces[number] for number in range(len(tensors))]


def gradient(like, kind, draw):
    if kind == "stride 0":
        return torch.full((1,) * like.dim(), 0.5, dtype=like.dtype, device=like.device).expand(like.shape)
    grad = draw(like.shape).to(like.dtype)
    return grad if kind == "contiguous" else torch.stack([grad, grad], dim=-1)[..., 0]


def everything(tensors, ids, segments, grads, case, backend):
    """Outputs and gradients of attention and of both KL losses."""
    x = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    index, main = (x["index_query"], x["index_key"]), (x["query"], x["key"], x["value"])
    sizes = {"block_size": case["block_size"], "backend": backend}
    output, lse = sparse_attention(*main, ids, segments, **sizes)
    kl = sparse_indexer_kl(*index, *main[:2], lse, ids, segments, **sizes)
    dense_output, dense_lse = dense_attention(*main, segments, backend=backend)
    dense_kl = dense_indexer_kl(*index, *main[:2], dense_lse, segments, backend=backend)
    results = {"output": output, "lse": lse, "kl": kl, "dense_output": dense_output, "dense_kl": dense_kl}
    for name, value, inputs in (
        ("output", output, ("query", "key", "value")),
        ("kl", kl, ("index_query", "index_key")),
        ("dense_output", dense_output, ("query", "key", "value")),
        ("dense_kl", dense_kl, ("index_query", "index_key")),
    ):
        gradients = torch.autograd.grad(value, [x[name] for name in inputs], grads[name].to(value.dtype))
        results |= {f"{name}/d_{of}": gradient for of, gradient in zip(inputs, gradients, strict=True)}
    return {name: tensor.detach() for name, tensor in results.items()}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id="-".join(map(str, case.values())), marks=[pytest.mark.gpu] * (case["dtype"] == "bf16"))
        for case in CASES
    ],
)
def test_case(case):
    segments, dtype = segments_of(case), DTYPES[case["dtype"]]
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(shape):
        return torch.randn(shape, generator=generator, device=DEVICE)

    g = case["groups"] if DEVICE == "cuda" else min(case["groups"], 2)
    n, d, i = g * case["heads"], case["head_dim"], case["index_dim"]
    shapes = {
        "query": (segments.num_queries, n, d),
        "key": (segments.num_keys, g, d),
        "value": (segments.num_keys, g, d),
        "index_query": (segments.num_queries, g, i),
        "index_key": (segments.num_keys, i),
    }
    dense = {name: draw(shape).to(dtype) for name, shape in shapes.items()}
    tensors = dict(zip(dense, laid_out(list(dense.values()), case["layout"]), strict=True))
    selection = {"block_size": case["block_size"], "num_selected_blocks": case["k"]}

    # Sums of small integers are exact: the ids must be the same, ties included.
    whole = [(0.6 * tensors[name].float()).round().to(dtype) for name in ("index_query", "index_key")]
    exact, expected_lse = select_blocks(*whole, segments, **selection)
    ids, lse = select_blocks(*whole, segments, **selection, backend="triton")
    assert torch.equal(ids, exact)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=3e-6)

    # Padding holds NaN, and nothing of it shows.
    outside = ~segments.query_mask(DEVICE)
    for name in ("query", "index_query"):
        tensors[name][outside] = math.nan
    for name in ("key", "value", "index_key"):
        tensors[name][sum(row[3] for row in segments.rows) :] = math.nan
    shape = (segments.num_queries, g)
    like = {name: torch.empty(shape, dtype=torch.float32, device=DEVICE) for name in ("kl", "dense_kl")}
    like |= {name: dense["query"] for name in ("output", "dense_output")}
    grads = {name: gradient(tensor, case["grad"], draw) for name, tensor in like.items()}

    truth = {name: tensor.double() for name, tensor in tensors.items()}
    expected = everything(truth, ids, segments, grads, case, "reference")
    actual = everything(tensors, ids, segments, grads, case, "triton")
    limit = LIMITS[case["dtype"]]
    for name, exact in expected.items():
        kept = exact.isfinite()
        assert torch.equal(actual[name].isfinite(), kept), name
        error = (actual[name][kept].double() - exact[kept]).norm()
        assert error <= limit * exact[kept].norm() + 1e-6 * exact[kept].numel() ** 0.5, f"{name}: {error:.1e}"
        if len(exact) == segments.num_queries:
            assert (actual[name][outside] == (-math.inf if name == "lse" else 0)).all(), name

    check_decode(case, tensors, actual, whole, ids, segments)


def check_decode(case, tensors, actual, whole, ids, segments):
    """The last query of each document, decoded from caches, gives that row."""
    last = [(q_start + q_len - 1, k_start, k_len) for q_start, q_len, k_start, k_len in segments.rows if q_len]
    rows = [row for row, _, _ in last]
    capacity = max(length for _, _, length in last) + 1

    def cache(tensor):
        out = tensor.new_full((len(last), capacity, *tensor.shape[1:]), math.nan)
        for number, (_, start, length) in enumerate(last):
            out[number, :length] = tensor[start : start + length]
        return out

    output, lse, decoded = decode_attention(
        tensors["query"][rows],
        cache(tensors["key"]),
        cache(tensors["value"]),
        whole[0][rows],
        cache(whole[1]),
        torch.tensor([length for _, _, length in last], dtype=torch.int32, device=DEVICE),
        block_size=case["block_size"],
        num_selected_blocks=case["k"],
        backend="triton",
    )
    assert torch.equal(decoded, ids[rows])
    torch.testing.assert_close(lse, actual["lse"][rows], rtol=0, atol=1e-5)
    error = (output.double() - actual["output"][rows].double()).norm() / actual["output"][rows].double().norm()
    assert error < 2 * LIMITS[case["dtype"]], f"decode: {error:.1e}"
