"""The Hopper kernels compile here, for a GPU that is not here, and know what they can do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from msa_pretrain.kernels.block_sparse_attention.hopper_launch import rows_per_pair, takes_hopper_kernels
from msa_pretrain.kernels.hopper import describe

MOST_SHARED_MEMORY = 232448


def test_they_compile_for_sm90_with_registers_for_their_products(tmp_path):
    """ptxas runs products one after the other where their accumulators do not fit, and says so.

    A barrier that no group of warps takes has its memory given to others (gluon_support.make_barriers).
    """
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "spill" in result.stdout and "serialized" not in result.stdout
    line = r"(\w+): shared (\d+), products (\d+), barriers (\d+), idle (\d+)\n"
    kernels = [(name, *map(int, counts)) for name, *counts in re.findall(line, result.stdout)]
    # Eight products of 64 x 128 x 16 for 128 dimensions or keys. Forward: scores and output, of three groups of warps.
    # Backward: scores twice, dP, dQ, dV, dK, P's mean. Full-sequence KL: two groups, the first head's scores for the
    # first tile and the next and two in a loop. Its products: queries and keys in steps of 128 and 64 rows, of twice 64
    # rows each, and what the rounding of the first rows lost, each of these with the sum of its rows beside it.
    assert [(name, *counts) for name, _, *counts in kernels] == [
        ("hopper_fwd_kernel", 48, 4, 0),
        ("hopper_bwd_kernel", 56, 10, 0),
        ("hopper_dense_kernel", 64, 3, 0),
        ("_dense_products_kernel", 36, 0, 0),
    ]
    assert all(shared <= MOST_SHARED_MEMORY for _, shared, *_ in kernels)


def test_nothing_but_a_hopper_takes_it():
    query = torch.zeros(4, 64, 128, dtype=torch.bfloat16)
    assert not takes_hopper_kernels(query, 4, 128)


@pytest.mark.parametrize("heads, rows", [(5, 8), (6, 8), (8, 8), (9, 16), (16, 16)])
def test_a_pair_has_eight_or_sixteen_rows(heads, rows):
    assert rows_per_pair(heads) == rows


def test_a_view_that_tma_cannot_read_is_copied():
    numbers = torch.arange(3 * 4 * 264, dtype=torch.float32).to(torch.float16)
    strided, odd = numbers[: 3 * 2 * 256].view(3, 2, 256)[:, :, ::2], numbers[: 3 * 2 * 132].view(3, 2, 132)[:, :, :128]
    heads = numbers[: 3 * 4 * 128].view(3, 4, 128)[:, ::2]
    for view, is_copied in ((strided, True), (odd, True), (heads, False)):
        descriptor = describe(view, [1, 8, 64])
        assert torch.equal(descriptor.base, view)
        assert (descriptor.base.data_ptr() != view.data_ptr()) == is_copied
        assert list(descriptor.shape) == [3, 2, 128] and all(stride % 8 == 0 for stride in descriptor.strides[:2])
