"""torch.compile of code around the ops."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from msa_pretrain.kernels import Segments, select_blocks, sparse_attention, sparse_indexer_kl

# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKS = [[0, 31, 80], [0, 80], [0, 1, 40, 79]]


def layer(x, weight, output_weight, index_weight, segments):
    """Two heads of each of two groups, index heads made from detached inputs, the output projected."""
    query, key, value = (x @ weight).view(-1, 8, 16).split([4, 2, 2], dim=1)
    index_query, index_key = (x.detach() @ index_weight).view(-1, 3, 16).split([2, 1], dim=1)
    index, sizes = (index_query, index_key[:, 0]), {"block_size": 16, "backend": "triton"}
    with torch.no_grad():
        ids, _ = select_blocks(*index, segments, num_selected_blocks=2, **sizes)
    output, lse = sparse_attention(query, key, value, ids, segments, dense_up_to=32, **sizes)
    kl = sparse_indexer_kl(*index, query, key, lse, ids, segments, dense_up_to=32, **sizes)
    return (output.flatten(1) @ output_weight).sin().sum() + kl.sum()


def test_a_compiled_layer_is_the_same_and_new_borders_compile_nothing():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if DEVICE == "cuda" else "aot_eager")
    compiled = torch.compile(layer, backend=counter)
    generator = torch.Generator().manual_seed(0)
    x, *weights = (
        torch.randn(shape, generator=generator).to(DEVICE) for shape in ((82, 16), (16, 128), (64, 16), (16, 48))
    )
    frames = []
    for borders in PACKS:
        segments = Segments.from_cu_seqlens(borders, 82)
        results = []
        for function in (layer, compiled):
            leaves = [weight.detach().requires_grad_() for weight in weights]
            loss = function(x, *leaves, segments)
            results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        frames.append(counter.frame_count)
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert frames[0] > 0 and frames == [frames[0]] * len(PACKS)
