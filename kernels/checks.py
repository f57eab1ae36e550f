"""Checks that the ops share. Each raises ValueError with the values found and the remedy."""

import math

import torch
from torch import Tensor

from .segments import Segments

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_backend(op: str, backend: str, available: tuple[str, ...]) -> None:
    if backend not in available:
        raise ValueError(f"{op}: backend '{backend}' does not exist for this op. Use one of: {', '.join(available)}.")


def check_floating(op: str, **tensors: Tensor) -> None:
    """Every tensor is floating point, and all have the dtype and the device of the first."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{op}: {name} has dtype {tensor.dtype}. Use one of: {', '.join(str(dtype) for dtype in FLOAT_DTYPES)}."
            )
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} but {first_name} is {first.dtype}. Cast them to one dtype."
            )
    check_device(op, **tensors)


def check_device(op: str, **tensors: Tensor) -> None:
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device} but {first_name} is on {first.device}. Move them to one device."
            )


def check_attention_inputs(
    op: str, segments: Segments, query: Tensor, key: Tensor, value: Tensor | None = None
) -> None:
    """query [t_q, n, d], key and value [t_k, g, d], g divides n, row counts as in `segments`."""
    if query.ndim != 3 or key.ndim != 3 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{op}: query must be [t_q, n, d] and key [t_k, g, d]; got {tuple(query.shape)} and {tuple(key.shape)}."
        )
    num_heads, num_groups = query.shape[1], key.shape[1]
    if num_groups == 0 or num_heads % num_groups:
        raise ValueError(
            f"{op}: the KV groups g ({num_groups}) must divide the query heads n ({num_heads}). "
            "Each group serves the same number of heads."
        )
    if value is not None and value.shape != key.shape:
        raise ValueError(
            f"{op}: value must have the shape of key [t_k, g, d]; got {tuple(value.shape)} and {tuple(key.shape)}."
        )
    check_rows(op, segments, query=query, key=key)


def check_index_inputs(op: str, segments: Segments, index_query: Tensor, index_key: Tensor) -> None:
    """index_query [t_q, g, i] and index_key [t_k, i], row counts as in `segments`."""
    if index_query.ndim != 3 or index_key.ndim != 2 or index_query.shape[2] != index_key.shape[1]:
        raise ValueError(
            f"{op}: index_query must be [t_q, g, i] and index_key [t_k, i]; got {tuple(index_query.shape)} and "
            f"{tuple(index_key.shape)}."
        )
    check_rows(op, segments, index_query=index_query, index_key=index_key)


def check_rows(op: str, segments: Segments, **tensors: Tensor) -> None:
    """The first tensor has `num_queries` rows, the second `num_keys`."""
    for (name, tensor), rows, kind in zip(
        tensors.items(), (segments.num_queries, segments.num_keys), ("num_queries", "num_keys"), strict=True
    ):
        if tensor.shape[0] != rows:
            raise ValueError(
                f"{op}: {name} has {tensor.shape[0]} rows but segments.{kind} is {rows}. "
                "Build the segments for these tensors."
            )


def check_block_size(op: str, block_size: int) -> None:
    if block_size < 1:
        raise ValueError(f"{op}: block_size ({block_size}) must be at least 1.")


def check_dense_up_to(op: str, dense_up_to: int, block_indices: Tensor, block_size: int) -> None:
    most = block_indices.shape[2] * block_size
    if not 0 <= dense_up_to <= most:
        raise ValueError(
            f"{op}: dense_up_to ({dense_up_to}) must be at least 0 and at most k x block_size ({most}): a query of a "
            "longer fragment does not keep all its blocks."
        )


def check_lse(op: str, lse: Tensor, query: Tensor) -> None:
    if lse.shape != query.shape[:2] or lse.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{op}: lse must be float32 or float64 [t_q, n] = {tuple(query.shape[:2])}; got {lse.dtype} "
            f"{tuple(lse.shape)}. Pass the lse that the attention op returned."
        )


def resolve_scale(op: str, softmax_scale: float | None, head_dim: int) -> float:
    """1/sqrt(d) unless given."""
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{op}: softmax_scale ({softmax_scale}) must be positive and finite. None means 1/sqrt(d).")
    return scale


def check_block_indices(
    op: str, block_indices: Tensor, segments: Segments, num_groups: int, block_size: int, *, read_ids: bool = True
) -> None:
    """int32 [t_q, g, k]; each row ascending without repeats, visible blocks only, -1 at the end.

    `read_ids=False` leaves the ids themselves unread, which on a GPU would wait for it.
    """
    expected = (segments.num_queries, num_groups)
    if block_indices.ndim != 3 or tuple(block_indices.shape[:2]) != expected or block_indices.shape[2] < 1:
        raise ValueError(
            f"{op}: block_indices must be [t_q, g, k] = [{expected[0]}, {expected[1]}, k >= 1]; "
            f"got {tuple(block_indices.shape)}."
        )
    if block_indices.dtype != torch.int32:
        raise ValueError(f"{op}: block_indices must be int32 as select_blocks returns them; got {block_indices.dtype}.")
    if not read_ids:
        return
    device = block_indices.device
    # The local block is the last visible one; padding rows see none. [t_q, 1, 1]
    local = torch.where(segments.query_mask(device), segments.positions(device) // block_size, -1)[:, None, None]
    bad = ((block_indices < -1) | (block_indices > local)).any(dim=2)
    left, right = block_indices[:, :, :-1], block_indices[:, :, 1:]
    bad |= ((right != -1) & ((left == -1) | (right <= left))).any(dim=2)
    if bool(bad.any()):
        row, group = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{op}: block_indices[{row}, {group}] is {block_indices[row, group].tolist()}, but ids must ascend without "
            f"repeats, lie in 0..{int(local[row])} (the blocks visible to this row) and end in -1 padding. "
            "Pass the ids of select_blocks for the same segments and block_size."
        )
