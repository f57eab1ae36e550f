"""Compile the Hopper kernels for a GPU that is not here; prints the log of ptxas, and of each kernel some numbers.

A process of its own: where Triton's interpreter has run, as in the tests, nothing compiles any more.
"""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from msa_pretrain.kernels.block_sparse_attention.hopper_backward_kernel import hopper_bwd_kernel
from msa_pretrain.kernels.block_sparse_attention.hopper_forward_kernel import hopper_fwd_kernel
from msa_pretrain.kernels.block_sparse_attention.hopper_launch import rows_per_pair
from msa_pretrain.kernels.indexer_loss.dense_gradient import products_sizes
from msa_pretrain.kernels.indexer_loss.dense_products_kernel import _dense_products_kernel
from msa_pretrain.kernels.indexer_loss.hopper_dense_kernel import hopper_dense_kernel
from msa_pretrain.kernels.indexer_loss.hopper_dense_launch import KEY_BOX, ROWS
from msa_pretrain.kernels.tuning import TABLE

# Six heads in eight rows, with P left: the case that needs the most registers.
HEADS = {"NUM_GROUPS": 8, "HEADS": 6}
ATTENTION = HEADS | {"NUM_SELECTED": 16, "PLACES": rows_per_pair(6)}
PAIR = [1, rows_per_pair(6), 64]
PRODUCTS = TABLE["dense_kl_products", "sm90", 0, 0, 2]
# Constants, then what TMA copies at once.
KERNELS = {
    hopper_fwd_kernel: (ATTENTION, {"query": ("bf16", PAIR), "partial": ("fp16", PAIR)}),
    hopper_bwd_kernel: (
        ATTENTION | {"TEACHER": True},
        {"query": ("bf16", PAIR), "grad": ("bf16", PAIR), "dq": ("fp16", PAIR)},
    ),
    hopper_dense_kernel: (
        HEADS | {"DIFFERENCE_SCALE": 1.0},
        dict.fromkeys(("query", "index_query"), ("bf16", [ROWS, 128]))
        | dict.fromkeys(("key", "index_key"), ("bf16", [KEY_BOX, 128])),
    ),
    _dense_products_kernel: (
        {"NUM_GROUPS": 8, "INDEX_DIM": 128, "PRECISION": "tf32", "stride_iki": 1} | products_sizes(PRODUCTS),
        {},
    ),
}
POINTERS = dict.fromkeys(("key", "centred", "value", "difference"), "*bf16") | {"teacher": "*fp16", "items": "*i64"}
POINTERS |= dict.fromkeys(("ik", "weighted", "d_iq"), "*bf16") | dict.fromkeys(("tiles", "key_tiles"), "*i64")
POINTERS |= dict.fromkeys(("query_table", "block_table", "pairs", "row_start", "local_end"), "*i32")
POINTERS |= dict.fromkeys(("row_item", "row_slot", "item_row", "chunk_item"), "*i32")
WHOLE_TILES = ("first_key", "end_key")


def kind(name, constants, boxes):
    """The type of an argument, as a launch finds it."""
    if name in constants:
        return "constexpr"
    if name.endswith("_desc"):
        dtype, box = boxes[name.removesuffix("_desc")]
        return f"tensordesc<{dtype}{box},{NVMMASharedLayout(128, 16, len(box))!r}>"
    if name.endswith("_ptr"):
        return POINTERS.get(name.removesuffix("_ptr"), "*fp32")
    return "fp32" if "scale" in name else "i32"


def barriers(ttgir):
    """How many arrays of barriers a kernel makes, and how many of them its groups of warps do not take."""
    made = set(re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\d+x1xi64", ttgir))
    whole = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)", ttgir))
    taken = re.findall(r"%\w+", "".join(re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)))
    return len(made), len(made - {whole.get(name, name) for name in taken})


triton.knobs.nvidia.dump_ptxas_log = True
for kernel, (constants, boxes) in KERNELS.items():
    names = kernel.arg_names
    aligned = [
        number
        for number, name in enumerate(names)
        if name not in constants and (name.endswith("_ptr") or name.startswith("stride") or name in WHOLE_TILES)
    ]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {name: kind(name, constants, boxes) for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(number,): [["tt.divisibility", 16]] for number in aligned},
    )
    options = {"num_warps": 4 if kernel.is_gluon() else PRODUCTS.num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    products = compiled.asm["ptx"].count("wgmma.mma_async")
    made, idle = barriers(compiled.asm["ttgir"])
    print(f"{kernel.__name__}: shared {compiled.metadata.shared}, products {products}, barriers {made}, idle {idle}")
