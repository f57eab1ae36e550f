"""Time the Triton ops of the index branch on one GPU: selection, decoding, warm-up (dense attention with its KL).

Run `pytest -m gpu tests/gpu` first: nothing here checks a result. Prints a JSON row for each measurement (medians of
CUDA event timings, bf16, random-normal inputs, batch 1) and writes all of them with the versions to `--output`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from msa_pretrain.kernels import Segments, attach_dense_kl, decode_attention, dense_attention, select_blocks
from msa_pretrain.scripts.bench_kernels import milliseconds

SHAPES = ((64, 4), (48, 8))
Row = dict[str, Any]


def median_ms(call: Callable[[], object]) -> float:
    """As Triton measures; of two calls where one takes more than half a second."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    if time.perf_counter() - start < 0.5:
        return triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median")
    return milliseconds(call, 2, warm_up=False)


def kernel_ms(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each of our kernels in one call."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    return {e.key: e.device_time_total / 1e3 for e in record.key_averages() if e.key.startswith("_")}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def bench_select_blocks(lengths: list[int]) -> Iterator[Row]:
    for _, g in SHAPES:
        for length in lengths:
            segments = Segments.from_cu_seqlens([0, length])
            x = draw(length, g, 128), draw(length, 128)

            def call(x=x, segments=segments):
                return select_blocks(*x, segments, block_size=128, num_selected_blocks=16, backend="triton")

            call()
            kernels = kernel_ms(call)
            flops = length * (length + 1) / 2 * g * 256
            scores = torch.rand(length * g, length // 128, device="cuda")
            yield {
                "stage": "select_blocks",
                "g": g,
                "n_tokens": length,
                "ms": median_ms(call),
                "scores_tflops": flops / kernels["_block_scores_kernel"] / 1e9,
                "torch_topk_ms": median_ms(lambda scores=scores: scores.topk(16)),
                "kernels_ms": kernels,
            }


def bench_warmup(lengths: list[int]) -> Iterator[Row]:
    """Dense attention forward and backward, alone and with the value and the gradients of the full-sequence KL."""
    for n, g in SHAPES:
        for length in lengths:
            segments = Segments.from_cu_seqlens([0, length])
            shapes = ((length, n, 128), (length, g, 128), (length, g, 128), (length, g, 128), (length, 128))
            leaves = [draw(*shape).requires_grad_() for shape in shapes]
            grad, weights = draw(length, n, 128), torch.rand(length, g, device="cuda")

            def dense(leaves=leaves, segments=segments, grad=grad):
                output, _ = dense_attention(*leaves[:3], segments, backend="triton")
                torch.autograd.grad(output, leaves[:3], grad)

            def with_kl(leaves=leaves, segments=segments, grad=grad, weights=weights):
                query, key, value, index_query, index_key = leaves
                output, lse = dense_attention(query, key, value, segments, backend="triton")
                index = (index_query, index_key, query, key, lse, segments)
                loss = dict(kl_weight=1.0, row_weight=weights, record=lambda kl: None)
                torch.autograd.grad(attach_dense_kl(output, *index, **loss), leaves, grad)

            # The library's deterministic backward of 128K tokens takes seconds.
            for deterministic in (False, True) if length <= 32768 else (False,):
                torch.use_deterministic_algorithms(deterministic)
                dense_ms, both_ms = median_ms(dense), median_ms(with_kl)
                yield {
                    "stage": "warmup",
                    "n": n,
                    "g": g,
                    "n_tokens": length,
                    "deterministic": deterministic,
                    "dense_fwd_bwd_ms": dense_ms,
                    "ms": both_ms,
                    "ratio": both_ms / dense_ms,
                }
            torch.use_deterministic_algorithms(False)


def replayed_ms(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_ms(graph.replay)


def bench_decode(lengths: list[int]) -> Iterator[Row]:
    """In CUDA graphs, beside cuDNN's and FlashAttention's dense decoding of the same caches."""
    for n, g in SHAPES:
        for length in lengths:
            x = draw(1, n, 128), draw(1, length, g, 128), draw(1, length, g, 128), draw(1, g, 128), draw(1, length, 128)
            lengths_now = torch.tensor([length], device="cuda", dtype=torch.int32)

            def call(x=x, lengths_now=lengths_now):
                return decode_attention(*x, lengths_now, block_size=128, num_selected_blocks=16, backend="triton")

            dense = {}
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

                def attend(x=x, backend=backend):
                    with sdpa_kernel(backend):
                        return torch.nn.functional.scaled_dot_product_attention(
                            x[0][:, :, None], x[1].transpose(1, 2), x[2].transpose(1, 2), enable_gqa=True
                        )

                dense[backend.name] = replayed_ms(attend)
            ms = replayed_ms(call)
            kernels = kernel_ms(call)
            yield {
                "stage": "decode",
                "n": n,
                "g": g,
                "n_tokens": length,
                "ms": ms,
                "dense_ms": dense,
                "ratio": min(dense.values()) / ms,
                "dense_tb_per_s": length * g * 512 / min(dense.values()) / 1e9,
                "scan_tb_per_s": length * 256 / kernels["_decode_scores_kernel"] / 1e9,
                "kernels_ms": kernels,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parts = {
        "select": bench_select_blocks([8192, 32768, 131072]),
        "decode": bench_decode([131072, 1048576]),
        "warmup": bench_warmup([8192, 32768, 131072]),
    }
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    arguments = parser.parse_args()
    rows = []
    for part in arguments.parts:
        for row in parts[part]:
            rows.append(row)
            print(json.dumps(row), flush=True)
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    arguments.output.write_text(json.dumps(versions | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
