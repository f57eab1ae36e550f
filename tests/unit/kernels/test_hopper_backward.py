"""The Hopper kernel of the sparse backward compiles here, for a GPU that is not here, and knows what it can do."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from msa_pretrain.kernels.block_sparse_attention.hopper_backward_launch import (
    describe,
    rows_per_pair,
    takes_hopper_backward,
)

MOST_SHARED_MEMORY = 232448


def described(dtype, box):
    from triton.experimental.gluon.language import NVMMASharedLayout

    return f"tensordesc<{dtype}{box},{NVMMASharedLayout(128, 16, len(box))!r}>"


def signature(names, constants, places):
    """The type of each argument, as a launch finds it."""
    fixed = {"query_desc": described("bf16", [1, places, 64]), "dq_desc": described("fp16", [places, 128])}
    fixed |= {"grad_desc": fixed["query_desc"], "teacher_ptr": "*fp16", "scale": "fp32"}
    fixed |= dict.fromkeys(("key_ptr", "centred_ptr", "value_ptr"), "*bf16") | dict.fromkeys(constants, "constexpr")
    tables = ("query_table", "block_table", "pairs", "row_start", "local_end", "row_item", "row_slot", "item_row")
    integers = [f"{name}_ptr" for name in (*tables, "chunk_item")]
    fixed |= dict.fromkeys(integers, "*i32")
    return {name: fixed.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names}


def test_it_compiles_for_sm90_with_registers_for_its_products(tmp_path, monkeypatch, capfd):
    """Six heads in eight rows, with P left: the case that needs the most registers."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from msa_pretrain.kernels.block_sparse_attention.hopper_backward_kernel import hopper_bwd_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    names = hopper_bwd_kernel.arg_names
    constants = {"NUM_GROUPS": 8, "NUM_SELECTED": 16, "HEADS": 6, "PLACES": rows_per_pair(6), "TEACHER": True}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(names)
        if name.endswith("_ptr") or name.startswith("stride")
    }
    source = GluonASTSource(
        hopper_bwd_kernel,
        signature(names, constants, constants["PLACES"]),
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    log = capfd.readouterr().out
    assert "spill" in log and "serialized" not in log
    assert kernel.metadata.shared <= MOST_SHARED_MEMORY
    assert kernel.asm["ptx"].count("wgmma.mma_async") >= 48


def test_nothing_but_a_hopper_takes_it():
    query = torch.zeros(4, 64, 128, dtype=torch.bfloat16)
    assert not takes_hopper_backward(query, 4, 128)


@pytest.mark.parametrize("heads, rows", [(5, 8), (6, 8), (8, 8), (9, 16), (16, 16)])
def test_a_pair_has_eight_or_sixteen_rows(heads, rows):
    assert rows_per_pair(heads) == rows


def test_a_view_that_tma_cannot_read_is_copied():
    whole = torch.arange(3 * 2 * 132, dtype=torch.float32).to(torch.float16).view(3, 2, 132)
    for view, is_copied in ((whole[:, :, :128], True), (torch.zeros(3, 4, 128, dtype=torch.float16)[:, ::2], False)):
        descriptor = describe(view, [1, 8, 64])
        assert torch.equal(descriptor.base, view)
        assert (descriptor.base.data_ptr() != view.data_ptr()) == is_copied
        assert list(descriptor.shape) == [3, 2, 128] and all(stride % 8 == 0 for stride in descriptor.strides[:2])
