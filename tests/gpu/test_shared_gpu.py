"""The same bits when other processes take turns with the GPU, which stops programs in the middle and resumes them."""

import subprocess
import sys

import pytest
import torch

from msa_pretrain.kernels import (
    Segments,
    attach_dense_kl,
    dense_attention,
    select_blocks,
    sparse_attention_with_kl,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
SEGMENTS = Segments.from_cu_seqlens([0, 500, 2600, 8192])
REPEATS = 400
NEIGHBOUR = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
while True:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
    print("turn", flush=True)
"""


@pytest.fixture(scope="module")
def neighbours():
    processes = [subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == b"turn\n"
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE).bfloat16()


def warmup(n, g):
    query, key = draw(8192, n, 128), draw(8192, g, 128)
    index = draw(8192, g, 128).requires_grad_(), draw(8192, 128).requires_grad_()
    output, lse = dense_attention(query, key, key, SEGMENTS, backend="triton")
    output.requires_grad_()

    def run():
        values = []
        attached = attach_dense_kl(output, *index, query, key, lse, SEGMENTS, kl_weight=1.0, record=values.append)
        return *torch.autograd.grad(attached, index, torch.zeros_like(output)), *values

    return run


def sparse(n, g):
    shapes = ((8192, n, 128), (8192, g, 128), (8192, g, 128), (8192, g, 128), (8192, 128))
    leaves, grad = [draw(*shape).requires_grad_() for shape in shapes], draw(8192, n, 128)

    def run():
        values = []
        chosen = select_blocks(*leaves[3:], SEGMENTS, block_size=128, num_selected_blocks=16, backend="triton")
        loss = dict(kl_weight=1.0, record=values.append)
        output = sparse_attention_with_kl(*leaves, *chosen, SEGMENTS, block_size=128, **loss)
        return output, *torch.autograd.grad(output, leaves, grad), *values

    return run


@pytest.mark.parametrize("n, g", [(12, 2), (48, 8), (64, 4)])
@pytest.mark.parametrize("make", [warmup, sparse])
def test_400_repeats_are_bit_equal(make, n, g, neighbours):
    run = make(n, g)
    first = run()
    different = torch.zeros(len(first), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS):
        different += torch.stack([(~torch.eq(*pair)).sum() for pair in zip(run(), first, strict=True)])
    assert different.tolist() == [0] * len(first)
    assert all(process.poll() is None for process in neighbours)
