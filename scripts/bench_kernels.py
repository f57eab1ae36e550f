"""Times the Triton ops of a sparse layer beside dense attention; correctness first.

    python -m msa_pretrain.scripts.bench_kernels --tokens 8192 32768 131072 --output docs/results/kernels

One document, random block selections (block 0, the local block, others at random), bf16, head dim 128, blocks of 128,
k=16. Writes OUTPUT.json (one row a stage) and OUTPUT.md. Dense is cuDNN's causal SDPA with enable_gqa, in the same run.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels import Segments, sparse_attention, sparse_indexer_kl
from ..kernels.block_sparse_attention.reverse_index import build_reverse_index, document_tables

DEVICE = torch.device("cuda")
HEAD_DIM = BLOCK_SIZE = INDEX_DIM = 128
NUM_SELECTED = 16
HEAD_SHAPES = ((64, 4), (48, 8))
CHECK_TOKENS = 3000
CHECK_LIMIT = 6e-3


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """Median over CUDA events after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def random_selection(num_tokens: int, num_groups: int) -> Tensor:
    """int32 [t, g, k] as select_blocks gives it."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    block = torch.arange(num_blocks, device=DEVICE)
    pieces = []
    for rows in torch.arange(num_tokens, device=DEVICE).split(16384):
        local = (rows // BLOCK_SIZE)[:, None, None]
        score = torch.rand(len(rows), num_groups, num_blocks, device=DEVICE)
        score = score.masked_fill(block == 0, 1.5).masked_fill(block == local, 2.0).masked_fill(block > local, -1.0)
        best = score.topk(min(NUM_SELECTED, num_blocks), dim=2)
        ids = best.indices.masked_fill(best.values < 0, num_blocks).sort(dim=2).values
        ids = F.pad(ids, (0, NUM_SELECTED - ids.shape[2]), value=num_blocks)
        pieces.append(ids.masked_fill(ids == num_blocks, -1).to(torch.int32))
    return torch.cat(pieces)


class Layer:
    """Random inputs of one layer and its ops."""

    def __init__(self, num_tokens: int, num_heads: int, num_groups: int):
        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

        self.segments = Segments.from_cu_seqlens([0, num_tokens])
        self.ids = random_selection(num_tokens, num_groups)
        self.query = randn(num_tokens, num_heads, HEAD_DIM).requires_grad_()
        self.key, self.value = (randn(num_tokens, num_groups, HEAD_DIM).requires_grad_() for _ in range(2))
        self.grad = randn(num_tokens, num_heads, HEAD_DIM)
        self.index_query = randn(num_tokens, num_groups, INDEX_DIM).requires_grad_()
        self.index_key = randn(num_tokens, INDEX_DIM).requires_grad_()
        self.lse = self.attend()[1]

    def attend(self, backend: str = "triton") -> tuple[Tensor, Tensor]:
        inputs = (self.query, self.key, self.value, self.ids, self.segments)
        return sparse_attention(*inputs, block_size=BLOCK_SIZE, backend=backend)

    def attend_and_back(self, backend: str = "triton") -> list[Tensor]:
        output, _ = self.attend(backend)
        return [output, *torch.autograd.grad(output, (self.query, self.key, self.value), self.grad)]

    def kl(self, backend: str = "triton") -> Tensor:
        teacher = (self.query.detach(), self.key.detach(), self.lse, self.ids, self.segments)
        return sparse_indexer_kl(self.index_query, self.index_key, *teacher, block_size=BLOCK_SIZE, backend=backend)

    def kl_and_back(self, backend: str = "triton") -> list[Tensor]:
        kl = self.kl(backend)
        return [kl, *torch.autograd.grad(kl.sum(), (self.index_query, self.index_key))]

    def dense(self) -> Tensor:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (self.query, self.key, self.value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output[0].transpose(0, 1)

    def dense_and_back(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.dense(), (self.query, self.key, self.value), self.grad)

    def reverse_index(self) -> None:
        query_table, block_table = document_tables(self.segments, BLOCK_SIZE, DEVICE)
        sizes = {"block_size": BLOCK_SIZE, "query_chunk": 16384, "item_queries": 512}
        build_reverse_index(self.ids, query_table, len(block_table), **sizes)

    def worst_error(self) -> float:
        """Largest ||triton - reference|| / ||reference|| over outputs and gradients."""
        ours = self.attend_and_back() + self.kl_and_back()
        theirs = self.attend_and_back("reference") + self.kl_and_back("reference")
        return max(
            ((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(ours, theirs, strict=True)
        )


def kept_pairs(num_tokens: int) -> int:
    """Visible (query, key) pairs in kept blocks, for one head."""
    total = 0
    for block in range(-(-num_tokens // BLOCK_SIZE)):
        rows = min(BLOCK_SIZE, num_tokens - block * BLOCK_SIZE)
        total += rows * min(block, NUM_SELECTED - 1) * BLOCK_SIZE + rows * (rows + 1) // 2
    return total


def bench(num_tokens: int, num_heads: int, num_groups: int, repeats: int) -> list[dict[str, Any]]:
    layer = Layer(num_tokens, num_heads, num_groups)
    stages: dict[str, tuple[Callable[[], Any], float]] = {
        "sparse_fwd": (lambda: layer.attend(), 4.0),
        "sparse_fwd_bwd": (lambda: layer.attend_and_back(), 14.0),
        "kl_fwd": (lambda: layer.kl(), 2.0),
        "kl_fwd_bwd": (lambda: layer.kl_and_back(), 4.0),
        "reverse_index": (lambda: layer.reverse_index(), 0.0),
        "dense_fwd": (lambda: layer.dense(), 0.0),
        "dense_fwd_bwd": (lambda: layer.dense_and_back(), 0.0),
    }
    rows: list[dict[str, Any]] = []
    for stage, (run, flops) in stages.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        time_ms = milliseconds(run, repeats)
        row: dict[str, Any] = {
            "n_tokens": num_tokens,
            "heads": f"{num_heads}/{num_groups}",
            "pattern": "random",
            "stage": stage,
        }
        row |= {"ms": round(time_ms, 4), "peak_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)}
        if flops:
            row["tflops"] = round(flops * num_heads * HEAD_DIM * kept_pairs(num_tokens) / time_ms / 1e9, 1)
        rows.append(row)
    dense = {row["stage"]: row["ms"] for row in rows}
    for row in rows:
        if row["stage"] in ("sparse_fwd", "sparse_fwd_bwd"):
            row["dense_ratio"] = round(dense[row["stage"].replace("sparse", "dense")] / row["ms"], 2)
    return rows


def markdown(header: dict[str, str], rows: list[dict[str, Any]]) -> str:
    columns = ("heads", "n_tokens", "stage", "ms", "tflops", "dense_ratio", "peak_gib")
    lines = ["# Sparse kernels", "", *(f"- {name}: {value}" for name, value in header.items()), ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    torch.manual_seed(0)
    header = {
        "GPU": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, cuDNN {torch.backends.cudnn.version()}",
        "command": f"python -m msa_pretrain.scripts.bench_kernels --tokens {' '.join(map(str, args.tokens))}",
    }
    rows: list[dict[str, Any]] = []
    for num_heads, num_groups in HEAD_SHAPES:
        error = Layer(CHECK_TOKENS, num_heads, num_groups).worst_error()
        header[f"worst relative error {num_heads}/{num_groups}, {CHECK_TOKENS} tokens"] = f"{error:.2e}"
        if not error < CHECK_LIMIT:
            raise SystemExit(f"relative error {error:.2e} is past {CHECK_LIMIT}: no timing of a wrong kernel.")
        for num_tokens in args.tokens:
            rows += bench(num_tokens, num_heads, num_groups, args.repeats)
            print(f"{num_heads}/{num_groups} {num_tokens}: " + str({row["stage"]: row["ms"] for row in rows[-7:]}))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".json").write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(markdown(header, rows))


if __name__ == "__main__":
    main()
