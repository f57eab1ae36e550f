"""The ten packs of tests/data/packed_documents_128k.json: a pack gives what its documents give alone.

On a GPU in full, 128K tokens in bf16 with the mission's sizes; in the interpreter at 1/1024 of the lengths.
"""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from msa_pretrain.kernels import Segments, select_blocks, sparse_attention, sparse_indexer_kl

# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

PACKS = json.loads((Path(__file__).parents[1] / "data" / "packed_documents_128k.json").read_text())["cu_seqlens"]

FULL = SimpleNamespace(device="cuda", dtype=torch.bfloat16, n=64, g=4, d=128, block_size=128, k=16, shrink=1)
SMALL = SimpleNamespace(device="cpu", dtype=torch.float32, n=3, g=1, d=16, block_size=16, k=2, shrink=1024)


def inputs(size, num_tokens):
    generator = torch.Generator(size.device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=size.device).to(size.dtype)

    index = {"index_query": draw(num_tokens, size.g, size.d), "index_key": draw(num_tokens, size.d)}
    main = {"key": draw(num_tokens, size.g, size.d), "value": draw(num_tokens, size.g, size.d)}
    return index | {"query": draw(num_tokens, size.n, size.d)} | main, draw(num_tokens, size.n, size.d)


def layer(size, tensors, grad, segments, backend):
    """Selection, attention and KL of one layer, forward and backward, as the model calls them."""
    x = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    index, sizes = (x["index_query"], x["index_key"]), {"block_size": size.block_size, "backend": backend}
    with torch.no_grad():
        ids, _ = select_blocks(*index, segments, num_selected_blocks=size.k, **sizes)
    sizes["dense_up_to"] = size.k * size.block_size
    output, lse = sparse_attention(x["query"], x["key"], x["value"], ids, segments, **sizes)
    kl = sparse_indexer_kl(*index, x["query"], x["key"], lse, ids, segments, **sizes)
    gradients = torch.autograd.grad((output, kl), tuple(x.values()), (grad, torch.ones_like(kl)))
    names = (f"d_{name}" for name in x)
    return {"ids": ids, "output": output.detach(), "lse": lse, "kl": kl.detach()} | dict(
        zip(names, gradients, strict=True)
    )


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("number", range(len(PACKS)))
@pytest.mark.parametrize(
    "size", [pytest.param(FULL, id="full", marks=pytest.mark.gpu), pytest.param(SMALL, id="small")]
)
def test_a_pack_gives_what_its_documents_give_alone(size, number):
    """On a GPU selection and forward are the same bit by bit."""
    borders = [border // size.shrink for border in PACKS[number]]
    tensors, grad = inputs(size, borders[-1])
    pack = layer(size, tensors, grad, Segments.from_cu_seqlens(borders), "triton")
    on_gpu = size.device == "cuda"
    alone = "triton" if on_gpu else "reference"
    for start, end in pairwise(borders):
        rows = slice(start, end)
        one = Segments.from_cu_seqlens([0, end - start])
        solo = layer(size, {name: x[rows] for name, x in tensors.items()}, grad[rows], one, alone)
        assert torch.equal(pack["ids"][rows], solo["ids"])
        # Sums over queries may round once more where a pack cuts them, and FlashAttention-2, which documents of at most
        # k * l tokens go to, sums d_query in the order in which its programs end.
        same_bits = {"output", "lse", "kl", *(["d_query"] if end - start > size.k * size.block_size else [])}
        for name, expected in solo.items():
            actual = pack[name][rows]
            if on_gpu and name in same_bits:
                assert torch.equal(actual, expected), (name, start)
            elif name != "ids":
                error = relative(actual, expected)
                assert error < (1e-2 if on_gpu else 2e-5) or expected.norm() < 1e-4, (name, start, error)
