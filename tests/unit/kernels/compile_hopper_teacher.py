"""Compiles the Hopper kernel of the teacher for sm_90a and prints one JSON row for each number of heads.

A process of its own: where Triton's interpreter has run, nothing compiles any more.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from msa_pretrain.kernels.indexer_loss.hopper_teacher_kernel import hopper_teacher_kernel
from msa_pretrain.kernels.indexer_loss.hopper_teacher_launch import KEY_BOX, ROWS


def described(rows):
    return f"tensordesc<bf16{[rows, 128]},{NVMMASharedLayout(128, 16, 2)!r}>"


def compiled(heads):
    names = hopper_teacher_kernel.arg_names
    constants = {"NUM_GROUPS": 4, "HEADS": heads}
    types = {"query_desc": described(ROWS), "key_desc": described(KEY_BOX), "items_ptr": "*i64", "scale": "fp32"}
    types |= dict.fromkeys(("lse_ptr", "probs_ptr"), "*fp32") | dict.fromkeys(constants, "constexpr")
    aligned = [name.endswith("_ptr") or name.startswith("stride_p") for name in names]
    source = GluonASTSource(
        hopper_teacher_kernel,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(number,): [["tt.divisibility", 16]] for number, is_aligned in enumerate(aligned) if is_aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


if __name__ == "__main__":
    for heads in map(int, sys.argv[1:]):
        kernel = compiled(heads)
        products = kernel.asm["ptx"].count("wgmma.mma_async")
        print(json.dumps({"heads": heads, "products": products, "shared": kernel.metadata.shared}))
