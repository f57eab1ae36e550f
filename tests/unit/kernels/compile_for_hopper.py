"""Compile the Hopper kernels for a GPU that is not here; prints the log of ptxas, and of each kernel some numbers.

A process of its own, as Triton's interpreter, in which the tests run, cannot compile.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from msa_pretrain.kernels.block_sparse_attention.hopper_backward_kernel import hopper_bwd_kernel
from msa_pretrain.kernels.block_sparse_attention.hopper_forward_kernel import hopper_fwd_kernel
from msa_pretrain.kernels.block_sparse_attention.hopper_launch import rows_per_pair

# Six heads in eight rows, with P left: the case that needs the most registers.
CONSTANTS = {"NUM_GROUPS": 8, "NUM_SELECTED": 16, "HEADS": 6, "PLACES": rows_per_pair(6)}
KERNELS = {"forward": (hopper_fwd_kernel, CONSTANTS), "backward": (hopper_bwd_kernel, CONSTANTS | {"TEACHER": True})}
TABLES = (
    "query_table",
    "block_table",
    "pairs",
    "row_start",
    "local_end",
    "row_item",
    "row_slot",
    "item_row",
    "chunk_item",
)


def signature(names, constants):
    """The type of each argument, as a launch finds it."""
    box = [1, constants["PLACES"], 64]
    described = f"{box},{NVMMASharedLayout(128, 16, 3)!r}>"
    types = dict.fromkeys(("query_desc", "grad_desc"), f"tensordesc<bf16{described}")
    types |= dict.fromkeys(("partial_desc", "dq_desc"), f"tensordesc<fp16{described}")
    types |= {"teacher_ptr": "*fp16", "scale": "fp32", "scale_log2": "fp32"}
    types |= dict.fromkeys(("key_ptr", "centred_ptr", "value_ptr"), "*bf16") | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys([f"{name}_ptr" for name in TABLES], "*i32")
    return {name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names}


triton.knobs.nvidia.dump_ptxas_log = True
for name, (kernel, constants) in KERNELS.items():
    names = kernel.arg_names
    aligned = [number for number, name in enumerate(names) if name.endswith("_ptr") or name.startswith("stride")]
    source = GluonASTSource(
        kernel,
        signature(names, constants),
        {(names.index(name),): value for name, value in constants.items()},
        {(number,): [["tt.divisibility", 16]] for number in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(f"{name}: shared {compiled.metadata.shared}, products {compiled.asm['ptx'].count('wgmma.mma_async')}")
