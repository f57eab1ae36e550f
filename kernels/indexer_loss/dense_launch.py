"""dense_indexer_kl in Triton: the launches and the registered op with its gradients."""

import math

import torch
from torch import Tensor

from ..segments import Segments
from ..triton_support import check_choice, check_triton, dot_precision
from ..tuning import TileConfig, tile_config
from ..work_tables import key_tiles, query_tiles
from . import dense_kernel

INDEX_DIMS = (16, 32, 64, 128)
HEAD_DIMS = (16, 32, 64, 128)
HEADS_PER_GROUP = tuple(range(1, 17))

FP16_SCALE = 4096.0
"""P_idx - P of long documents lies among fp16's subnormals; this lifts it, and 1 still fits."""


def difference_scale(dtype: torch.dtype) -> float:
    """By how much P_idx - P is larger in products of this dtype."""
    return FP16_SCALE if dtype == torch.float16 else 1.0


def _config(op: str, query: Tensor, index_query: Tensor, num_groups: int) -> TileConfig:
    itemsize = max(query.dtype.itemsize, index_query.dtype.itemsize)
    heads_per_group = query.shape[1] // num_groups
    return tile_config(op, query.device, head_dim=query.shape[2], heads_per_group=heads_per_group, itemsize=itemsize)


def _shared_arguments(index_query: Tensor, query: Tensor, key: Tensor, config: TileConfig) -> dict[str, object]:
    return {
        "NUM_GROUPS": key.shape[1],
        "HEADS": query.shape[1] // key.shape[1],
        "INDEX_DIM": index_query.shape[2],
        "HEAD_DIM": query.shape[2],
        "BLOCK_M": config.rows,
        "BLOCK_N": config.columns,
        "DS_SCALE": difference_scale(index_query.dtype),
        "INDEX_PRECISION": dot_precision(index_query.dtype),
        "PRECISION": dot_precision(query.dtype),
        "SPLIT": index_query.dtype != torch.float32,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()]


def in_two(number: float) -> tuple[float, float]:
    """The fp32 value of a number and what is left."""
    single = float(torch.tensor(number, dtype=torch.float32))
    return single, number - single


def dense_kl_fwd(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    tiles: Tensor,
    softmax_scale: float,
    with_gradient: bool,
    config: TileConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """kl [t_q, g], student [t_q, g, 2] and d_unit [t_q, g, i] (empty without gradient), fp32; see dense_kernel."""
    num_rows, num_groups, index_dim = index_query.shape
    new = index_query.new_zeros
    kl = new((num_rows, num_groups), dtype=torch.float32)
    student = new((num_rows, num_groups, 2), dtype=torch.float32)
    d_unit = new((num_rows, num_groups, index_dim) if with_gradient else 0, dtype=torch.float32)
    if len(tiles):
        dense_kernel._dense_kl_fwd_kernel[(len(tiles) * num_groups,)](
            index_query, index_key, query, key, lse, tiles, kl, student, d_unit,
            *in_two(softmax_scale), *in_two(index_dim**-0.5),
            *_strides(index_query, index_key, query, key, lse), WITH_GRADIENT=with_gradient,
            **_shared_arguments(index_query, query, key, config),
        )  # fmt: skip
    return kl, student, d_unit


def dense_student(index_query: Tensor, index_key: Tensor, tiles: Tensor, config: TileConfig) -> Tensor:
    """The student's lse over all visible tokens, fp32 [t_q, g]; 0 in rows of no tile."""
    num_groups, index_dim = index_query.shape[1:]
    lse = index_query.new_zeros(index_query.shape[:2], dtype=torch.float32)
    if len(tiles):
        dense_kernel._dense_student_kernel[(len(tiles) * num_groups,)](
            index_query, index_key, tiles, lse, *in_two(index_dim**-0.5), *_strides(index_query, index_key),
            NUM_GROUPS=num_groups, INDEX_DIM=index_dim, BLOCK_M=config.rows, BLOCK_N=config.columns,
            INDEX_PRECISION=dot_precision(index_query.dtype), STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
    return lse


def dense_kl_bwd_key(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    student: Tensor,
    weight: Tensor,
    tiles: Tensor,
    layers: list[list[int]],
    softmax_scale: float,
    config: TileConfig,
) -> Tensor:
    """Gradient of the index keys, fp32 [t_k, i], for row weights fp32 [t_q, g] that are 0 for rows with one token."""
    num_groups, index_dim = index_query.shape[1:]
    # Weights near 1, whatever the loss is divided by: fp16 has no room for small ones.
    largest = weight.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    d_index_key = index_key.new_zeros((index_key.shape[0], num_groups, index_dim), dtype=torch.float32)
    arguments = _shared_arguments(index_query, query, key, config)
    scaled = weight / largest
    for first, count in layers:
        dense_kernel._dense_kl_bwd_key_kernel[(count * num_groups,)](
            index_query, index_key, query, key, lse, tiles, student, scaled, d_index_key, first,
            *in_two(softmax_scale), *in_two(index_dim**-0.5),
            *_strides(index_query, index_key, query, key, lse), **arguments,
        )  # fmt: skip
    return d_index_key.sum(dim=1) * (largest * (index_dim**-0.5 / arguments["DS_SCALE"]))


@torch.library.custom_op("msa_pretrain::dense_indexer_kl", mutates_args=())
def _dense_indexer_kl(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    tiles: Tensor,
    key_tiles: Tensor,
    layers: Tensor,
    several_tokens: Tensor,
    softmax_scale: float,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    config = _config("dense_kl_fwd", query, index_query, key.shape[1])
    return dense_kl_fwd(index_query, index_key, query, key, lse, tiles, softmax_scale, with_gradient, config)


@_dense_indexer_kl.register_fake
def _(index_query, index_key, query, key, lse, tiles, key_tiles, layers, several_tokens, softmax_scale, with_gradient):
    shape = index_query.shape
    kl = index_query.new_empty(shape[:2], dtype=torch.float32)
    return kl, kl.new_empty((*shape[:2], 2)), index_query.new_empty(shape if with_gradient else 0, dtype=torch.float32)


@torch.library.custom_op("msa_pretrain::dense_indexer_kl_backward", mutates_args=())
def _dense_indexer_kl_backward(
    grad: Tensor,
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    student: Tensor,
    d_unit: Tensor,
    key_tiles: Tensor,
    layers: Tensor,
    several_tokens: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    # Rows without a gradient may carry anything, NaN included.
    weight = torch.where(several_tokens[:, None], grad, 0.0)
    d_index_query = torch.where(
        several_tokens[:, None, None], weight[:, :, None] * d_unit * index_query.shape[2] ** -0.5, 0.0
    )
    config = _config("dense_kl_bwd", query, index_query, key.shape[1])
    d_index_key = dense_kl_bwd_key(
        index_query, index_key, query, key, lse, student, weight, key_tiles, layers.tolist(), softmax_scale, config
    )
    return d_index_query.to(index_query.dtype), d_index_key.to(index_key.dtype)


@_dense_indexer_kl_backward.register_fake
def _(grad, index_query, index_key, query, key, lse, student, d_unit, key_tiles, layers, several_tokens, softmax_scale):
    return index_query.new_empty(index_query.shape), index_key.new_empty(index_key.shape)


def _setup_context(ctx, inputs, output):
    *tensors, _, key_tiles, layers, several_tokens, softmax_scale, _ = inputs
    _, student, d_unit = output
    ctx.mark_non_differentiable(student, d_unit)
    ctx.save_for_backward(*tensors, student, d_unit, key_tiles, layers, several_tokens)
    ctx.softmax_scale = softmax_scale


def _backward(ctx, grad, grad_student, grad_d_unit):
    d_index_query, d_index_key = _dense_indexer_kl_backward(grad, *ctx.saved_tensors, ctx.softmax_scale)
    return d_index_query, d_index_key, *[None] * 9


_dense_indexer_kl.register_autograd(_backward, setup_context=_setup_context)


def _build_layers(segments: Segments, rows: int) -> Tensor:
    """(first tile, tiles) of runs of key tiles without overlap, in fragment order; int64 [runs, 2] on the CPU.

    Whole documents are one run. Nested ranges of one document are two: their key gradients add up, in this order.
    """
    runs: list[list[int]] = []
    ranges: list[tuple[int, int]] = []
    count = 0
    for _, q_len, k_start, k_len in segments.rows:
        if not q_len:
            continue
        if not runs or any(start < k_start + k_len and k_start < end for start, end in ranges):
            runs.append([count, 0])
            ranges.clear()
        if ranges and ranges[-1][1] == k_start:
            ranges[-1] = (ranges[-1][0], k_start + k_len)
        else:
            ranges.append((k_start, k_start + k_len))
        tiles = math.ceil(k_len / rows)
        runs[-1][1] += tiles
        count += tiles
    return torch.tensor(runs, dtype=torch.int64).reshape(-1, 2)


def check_supported(op: str, index_query: Tensor, index_key: Tensor, query: Tensor, key: Tensor) -> None:
    check_triton(op, index_query, index_key, query, key)
    check_choice(op, "an index dim of", index_query.shape[2], INDEX_DIMS)
    check_choice(op, "a head dim of", query.shape[2], HEAD_DIMS)
    check_choice(op, "n/g of", query.shape[1] // key.shape[1], HEADS_PER_GROUP)


def dense_indexer_kl_triton(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    segments: Segments,
    *,
    softmax_scale: float,
) -> Tensor:
    """See `dense_indexer_kl`."""
    op = "dense_indexer_kl"
    check_supported(op, index_query, index_key, query, key)
    kl, _, _ = _dense_indexer_kl(
        index_query,
        index_key,
        query.detach(),
        key.detach(),
        lse.detach().float(),
        *op_tables(index_query, query, key.shape[1], segments),
        softmax_scale,
        torch.is_grad_enabled() and (index_query.requires_grad or index_key.requires_grad),
    )
    return kl


def op_tables(
    index_query: Tensor, query: Tensor, num_groups: int, segments: Segments
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query tiles, key tiles, their layers (on the CPU) and the rows with several tokens, as the op takes them."""
    rows = _config("dense_kl_fwd", query, index_query, num_groups).rows
    columns = _config("dense_kl_bwd", query, index_query, num_groups).columns
    return (
        query_tiles(segments, query.device, rows=rows),
        *key_tiles_in_layers(segments, query.device, columns),
        several_tokens(segments, query.device),
    )


def key_tiles_in_layers(segments: Segments, device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    """Key tiles of `rows` keys and, on the CPU, the runs of them to launch one after the other."""
    layers = segments.cached(f"key_tile_layers_{rows}", "cpu", lambda: _build_layers(segments, rows))
    return key_tiles(segments, device, rows=rows), layers


def several_tokens(segments: Segments, device: torch.device) -> Tensor:
    """bool [t_q]: whether the row sees more than one token."""
    return segments.cached("several_tokens", device, lambda: segments.positions("cpu") > 0)
