"""dense_attention with the fused kernels that PyTorch ships: cuDNN and FlashAttention-2.

Nothing of our own: on Hopper, cuDNN's dense attention is the fastest there is, and both kernels return the lse that the
indexer's KL needs. Runs of documents go to

- cuDNN, one call a document, if its length is a multiple of CUDNN_LENGTH (cuDNN compiles a graph per length, so lengths
  must come from a short list) and deterministic algorithms are off (cuDNN's backward has no fixed order of sums);
- FlashAttention-2, one call for all neighbouring documents, otherwise. It is 1.6 to 2 times slower, aligns queries
  bottom right as `Segments` does, and sums in a fixed order under `torch.use_deterministic_algorithms(True)`.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..segments import Segments
from ..triton_support import unit_stride
from .reference import dense_attention_reference, dense_gradients_reference

CUDNN_LENGTH = 1024

_aten = torch.ops.aten


@dataclass(frozen=True)
class Run:
    """Neighbouring fragments for one library call; `borders` is where their cumulative lengths start in the table."""

    cudnn: bool
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    borders: int
    num_fragments: int
    max_q: int
    max_k: int

    @property
    def queries(self) -> slice:
        return slice(self.q_start, self.q_start + self.q_len)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_start + self.k_len)


def plan_runs(segments: Segments, deterministic: bool) -> tuple[list[Run], list[int]]:
    """The runs in fragment order, and the borders of their queries, then keys, one run after the other."""
    groups: list[tuple[bool, list[tuple[int, int, int, int]]]] = []
    for row in segments.rows:
        q_start, q_len, k_start, k_len = row
        if not q_len:
            continue
        cudnn = not deterministic and q_len == k_len and q_len % CUDNN_LENGTH == 0
        if groups and not cudnn and not groups[-1][0]:
            last = groups[-1][1][-1]
            if last[0] + last[1] == q_start and last[2] + last[3] == k_start:
                groups[-1][1].append(row)
                continue
        groups.append((cudnn, [row]))
    runs: list[Run] = []
    borders: list[int] = []
    for cudnn, rows in groups:
        q_lens, k_lens = [row[1] for row in rows], [row[3] for row in rows]
        sizes = (sum(k_lens), len(borders), len(rows), max(q_lens), max(k_lens))
        runs.append(Run(cudnn, rows[0][0], sum(q_lens), rows[0][2], *sizes))
        for lengths in (q_lens, k_lens):
            borders += [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    return runs, borders


def _overlap(runs: list[Run]) -> bool:
    ends = sorted((run.k_start, run.k_start + run.k_len) for run in runs)
    return any(left[1] > right[0] for left, right in pairwise(ends))


def _table(runs: list[Run]) -> Tensor:
    """`runs` as int64 [runs, 9] on the CPU: a custom op takes tensors, and these guard nothing under torch.compile."""
    return torch.tensor([list(vars(run).values()) for run in runs], dtype=torch.int64).reshape(-1, 9)


def _runs(table: Tensor) -> list[Run]:
    return [Run(bool(cudnn), *numbers) for cudnn, *numbers in table.tolist()]


def _borders(run: Run, borders: Tensor) -> tuple[Tensor, Tensor]:
    count = run.num_fragments + 1
    return borders[run.borders : run.borders + count], borders[run.borders + count : run.borders + 2 * count]


def _fragments(run: Run, borders: Tensor) -> Segments:
    """The run's fragments, counted from its first rows."""
    cu_q, cu_k = (list(pairwise(cumulative.tolist())) for cumulative in _borders(run, borders))
    rows = tuple((q, q_end - q, k, k_end - k) for (q, q_end), (k, k_end) in zip(cu_q, cu_k, strict=True))
    return Segments(rows, run.q_len, run.k_len)


def _heads_first(tensor: Tensor) -> Tensor:
    """[rows, heads, d] as [1, heads, rows, d]."""
    return tensor.transpose(0, 1)[None]


def has_library(query: Tensor) -> bool:
    """Whether the libraries take tensors like this one."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def forward_runs(
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    borders: Tensor,
    scale: float,
) -> None:
    """Write the rows of all runs to `output` [t_q, n, d] and `lse` fp32 [t_q, n]; see `dense_tables` for the runs."""
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    for run in _runs(table):
        out, run_lse = _forward_run(run, query, key, value, borders, scale)
        output[run.queries] = out
        lse[run.queries] = run_lse.T


def forward_alone(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, borders: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """What `forward_runs` writes where all rows are those of one run: the library's own output, without a copy."""
    (run,) = _runs(table)
    out, run_lse = _forward_run(run, unit_stride(query), unit_stride(key), unit_stride(value), borders, scale)
    return out.contiguous(), run_lse.T.contiguous()


def _forward_run(
    run: Run, query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [rows, n, d] and lse fp32 [n, rows] of the run's queries."""
    q, k, v = query[run.queries], key[run.keys], value[run.keys]
    if not has_library(query):
        rows = _fragments(run, borders)
        out, lse = dense_attention_reference(q, k, v, rows, softmax_scale=scale)
        return out, lse.T
    if run.cudnn:
        result = _aten._scaled_dot_product_cudnn_attention(
            _heads_first(q), _heads_first(k), _heads_first(v), None, True, 0.0, True, False, scale=scale
        )
        return result[0][0].transpose(0, 1), result[1].reshape(query.shape[1], run.q_len)
    cu_q, cu_k = _borders(run, borders)
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, run.max_q, run.max_k, 0.0, True, False, scale=scale
    )
    return out, lse


def backward_runs(
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    table: Tensor,
    borders: Tensor,
    scale: float,
) -> None:
    """Write the query gradients of all runs, and add those of keys and values, in fragment order."""
    grad, query, key, value = (unit_stride(tensor) for tensor in (grad, query, key, value))
    no_seed = torch.zeros((), dtype=torch.int64, device=key.device)
    for run in _runs(table):
        q, k, v = query[run.queries], key[run.keys], value[run.keys]
        out, dout = output[run.queries], grad[run.queries]
        run_lse = lse[run.queries].T.contiguous()
        if not has_library(query):
            rows = _fragments(run, borders)
            dq, dk, dv = dense_gradients_reference(dout, q, k, v, out, lse[run.queries], rows, softmax_scale=scale)
        elif run.cudnn:
            grads = _aten._scaled_dot_product_cudnn_attention_backward(
                *(_heads_first(x) for x in (dout, q, k, v, out)), run_lse[None, :, :, None], no_seed, no_seed,
                None, None, None, run.q_len, run.k_len, 0.0, True, scale=scale,
            )  # fmt: skip
            dq, dk, dv = (x[0].transpose(0, 1) for x in grads)
        else:
            cu_q, cu_k = _borders(run, borders)
            dq, dk, dv = _aten._flash_attention_backward(
                dout, q, k, v, out, run_lse, cu_q, cu_k, run.max_q, run.max_k, 0.0, True,
                no_seed.new_zeros(2).view(torch.uint64), no_seed.view(torch.uint64), scale=scale,
            )  # fmt: skip
        d_query[run.queries] = dq
        d_key[run.keys] += dk
        d_value[run.keys] += dv


@torch.library.custom_op("msa_pretrain::dense_attention", mutates_args=())
def _dense_attention(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, borders: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`table` is on the CPU, `borders` int32 on the device."""
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
    forward_runs(output, lse, query, key, value, table, borders, scale)
    return output, lse


@_dense_attention.register_fake
def _(query, key, value, table, borders, scale):
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("msa_pretrain::dense_attention_backward", mutates_args=())
def _dense_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    table: Tensor,
    borders: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    d_query = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    # Nested key ranges add up in fp32.
    dtype = torch.float32 if _overlap(_runs(table)) else key.dtype
    d_key, d_value = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (key, value))
    backward_runs(d_query, d_key, d_value, grad, query, key, value, output, lse, table, borders, scale)
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


@_dense_attention_backward.register_fake
def _(grad, query, key, value, output, lse, table, borders, scale):
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx, inputs, output):
    query, key, value, table, borders, scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, table, borders)
    ctx.scale = scale


def _backward(ctx, grad, grad_lse):
    return *_dense_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


_dense_attention.register_autograd(_backward, setup_context=_setup_context)


def check_head_dim(query: Tensor) -> None:
    if has_library(query) and (query.shape[2] % 8 or query.shape[2] > 128):
        raise ValueError(
            f"dense_attention: backend 'triton' supports head dims that are multiples of 8 up to 128; got "
            f"{query.shape[2]}. Use a supported size or backend='reference'."
        )


def dense_tables(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """The runs (on the CPU) and their borders (int32 on `device`) as the ops take them, built once for the segments."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    name = f"dense_runs_{deterministic}"
    return (
        segments.cached(name, "cpu", lambda: _table(plan_runs(segments, deterministic)[0])),
        segments.cached(
            name + "_borders",
            device,
            lambda: torch.tensor(plan_runs(segments, deterministic)[1], dtype=torch.int32),
        ),
    )


def dense_attention_library(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """See `dense_attention`: fp16 or bf16 on a GPU."""
    check_head_dim(query)
    table, borders = dense_tables(segments, query.device)
    return _dense_attention(query, key, value, table, borders, softmax_scale)
