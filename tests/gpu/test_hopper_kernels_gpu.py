"""The Hopper kernels give the bits of the Triton kernels: output, gradients, and the KL made from the backward's P."""

import pytest
import torch

from msa_pretrain.kernels import Segments, select_blocks, sparse_attention_with_kl
from msa_pretrain.kernels.block_sparse_attention import backward_launch, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

DEVICE = torch.device("cuda")
# A document of one token, one of less than a tile, one with a block of 33 tokens, and padding.
BORDERS = [0, 1, 20, 3125, 3140, 8900]
NUM_TOKENS = 9000


def output_and_gradients(monkeypatch, is_hopper, inputs, grad, segments, ids, index_lse):
    if not is_hopper:
        for module in (launch, backward_launch):
            monkeypatch.setattr(module, "takes_hopper_kernels", lambda *arguments: False)
    sums = []
    output = sparse_attention_with_kl(
        *inputs, ids, index_lse, segments, block_size=128, kl_weight=0.5, record=sums.append, query_chunk=4096
    )
    results = [output.detach(), *torch.autograd.grad(output, inputs, grad), *sums]
    monkeypatch.undo()
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n, g", [(64, 4), (48, 8), (10, 2), (12, 1), (6, 1)])
def test_the_bits_are_those_of_the_triton_kernels(n, g, dtype, monkeypatch):
    """Several chunks, items and slots; strided heads; NaN in the padding, which TMA may not bring in."""
    generator = torch.Generator(DEVICE).manual_seed(n)

    def randn(*shape):
        rows = torch.randn(NUM_TOKENS, *shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)
        rows[BORDERS[-1] :] = torch.nan
        return rows

    segments = Segments.from_cu_seqlens(BORDERS, NUM_TOKENS)
    mixed = randn(n + 2 * g, 128)
    inputs = [*mixed.split([n, g, g], dim=1), randn(g, 128), randn(128)]
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    grad = randn(n, 128)
    with torch.no_grad():
        sizes = {"block_size": 128, "num_selected_blocks": 16}
        ids, index_lse = select_blocks(*inputs[3:], segments, backend="triton", **sizes)
    arguments = (inputs, grad, segments, ids, index_lse)
    ours, theirs = (output_and_gradients(monkeypatch, is_hopper, *arguments) for is_hopper in (True, False))
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        valid = a[: BORDERS[-1]] if a.ndim else a
        assert valid.isfinite().all() and valid.abs().max() > 0, number
        assert torch.equal(valid, b[: BORDERS[-1]] if b.ndim else b), number
