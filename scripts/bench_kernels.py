"""Times a sparse layer's kernels beside dense attention; correctness first.

    python -m msa_pretrain.scripts.bench_kernels --output docs/results/kernels

bf16, head dim 128, blocks of 128, k=16, one document of each length. A layer is what training runs: selection with its
top-k, sparse attention forward, and the backward that also makes the indexer's KL and its gradients. Dense is cuDNN's
causal SDPA with enable_gqa in the same run, one call a document, with the library free to pick its order of sums.
Patterns: `random` (block 0, the local block, others at random), `sink` (block 0, the local block, two before it, 6 of
24 hot blocks, others), `tile` (random, the same for 128 neighbouring queries), with --trained FILE selections of a
model (scripts/save_selections.py), and with --packs FILE packed documents (JSON with `cu_seqlens`), which attend to
the blocks that random index vectors select. --forward-only N adds the forward of a layer: selection and attention.

Times are medians of calls queued one after the other, as in training, where the host runs ahead of the GPU; up to 16K
tokens, where the host's launches take longer than the GPU, of replays of a CUDA graph, on both sides. Past 512K tokens
a stage runs once. Writes OUTPUT.json, one row a stage, and OUTPUT.md.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels import Segments, select_blocks, sparse_attention, sparse_attention_with_kl, sparse_indexer_kl
from ..kernels.block_sparse_attention.reverse_index import build_reverse_index, document_tables

DEVICE = torch.device("cuda")
HEAD_DIM = BLOCK_SIZE = INDEX_DIM = 128
NUM_SELECTED = 16
DENSE_UP_TO = NUM_SELECTED * BLOCK_SIZE
HEAD_SHAPES = ((64, 4), (48, 8))
CHECK_TOKENS = (1900, 3000)  # dense attention, sparse attention
CHECK_LIMIT = 6e-3
GRAPH_TOKENS = 16384
WARM_TOKENS = 2**19
# Rates of an H200 that floors are counted from: a large bf16 product, a device copy.
MATMUL_TFLOPS, COPY_TBS = 795, 4.3
# Multiply-adds a (query head, kept key) pair and channel, forward; backward has 2.5 times as many.
ATTENTION_FLOPS = {"sparse_fwd": 4.0, "sparse_fwd_bwd": 14.0, "dense_fwd": 4.0, "dense_fwd_bwd": 14.0}


def milliseconds(run: Callable[[], Any], repeats: int, warm_up: bool = True) -> float:
    """Median over calls; the GPU first sleeps, so that the host is ahead of it."""
    if warm_up:
        run()
    torch.cuda._sleep(20_000_000)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairwise(events))


def graph_milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """The same of replays of a CUDA graph of `run`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay, repeats)


def ranked(score: Tensor) -> Tensor:
    """int32 [rows, g, k]: the best blocks of score [rows, g, blocks], as select_blocks gives them; < 0: not visible."""
    num_blocks = score.shape[2]
    best = score.topk(min(NUM_SELECTED, num_blocks), dim=2)
    ids = best.indices.masked_fill(best.values < 0, num_blocks).sort(dim=2).values
    ids = F.pad(ids, (0, NUM_SELECTED - ids.shape[2]), value=num_blocks)
    return ids.masked_fill(ids == num_blocks, -1).to(torch.int32)


def selection(pattern: str, num_tokens: int, num_groups: int) -> Tensor:
    """int32 [t, g, k] of a pattern of the module's docstring."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    block = torch.arange(num_blocks, device=DEVICE)
    hot = torch.rand(num_groups, num_blocks, device=DEVICE).topk(min(24, num_blocks)).indices
    pieces = []
    for rows in torch.arange(num_tokens, device=DEVICE).split(16384):
        local = (rows // BLOCK_SIZE)[:, None, None]
        shape = (len(rows) // BLOCK_SIZE + 1, num_groups, num_blocks) if pattern == "tile" else None
        score = torch.rand(shape or (len(rows), num_groups, num_blocks), device=DEVICE)
        if pattern == "tile":
            score = score.repeat_interleave(BLOCK_SIZE, 0)[: len(rows)]
        if pattern == "sink":
            chosen = torch.rand(len(rows), num_groups, hot.shape[1], device=DEVICE).argsort(2)[:, :, :6]
            picked = hot.expand(len(rows), -1, -1).gather(2, chosen)
            score.scatter_add_(2, picked, torch.ones_like(picked, dtype=score.dtype))
            score = torch.where((block >= local - 2) & (block < local), 2.5, score)
        score = score.masked_fill(block == 0, 2.8).masked_fill(block == local, 3.0).masked_fill(block > local, -1.0)
        pieces.append(ranked(score))
    return torch.cat(pieces)


class Layer:
    """Random inputs of one layer and its ops; without `ids`, those that the index vectors select."""

    def __init__(self, borders: Sequence[int], num_heads: int, num_groups: int, ids: Tensor | None = None):
        num_tokens = borders[-1]

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

        self.borders = borders
        self.segments = Segments.from_cu_seqlens(borders)
        self.query = randn(num_tokens, num_heads, HEAD_DIM).requires_grad_()
        self.key, self.value = (randn(num_tokens, num_groups, HEAD_DIM).requires_grad_() for _ in range(2))
        self.grad = randn(num_tokens, num_heads, HEAD_DIM)
        self.index_query = randn(num_tokens, num_groups, INDEX_DIM).requires_grad_()
        self.index_key = randn(num_tokens, INDEX_DIM).requires_grad_()
        self.index_lse = torch.full((num_tokens, num_groups), 20.0, device=DEVICE)
        self.inputs = (self.query, self.key, self.value)
        self.routes = {"block_size": BLOCK_SIZE, "dense_up_to": DENSE_UP_TO}
        self.ids = self.select()[0] if ids is None else ids

    def select(self) -> tuple[Tensor, Tensor]:
        index = (self.index_query.detach(), self.index_key.detach())
        sizes = {"block_size": BLOCK_SIZE, "num_selected_blocks": NUM_SELECTED}
        return select_blocks(*index, self.segments, backend="triton", **sizes)

    def attend(self, backend: str = "triton") -> tuple[Tensor, Tensor]:
        return sparse_attention(*self.inputs, self.ids, self.segments, **self.routes, backend=backend)

    def attend_and_back(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.attend()[0], self.inputs, self.grad)

    def with_kl(self, ids: Tensor, index_lse: Tensor) -> list[Tensor]:
        """Output, the five gradients, KL."""
        leaves, sums = (*self.inputs, self.index_query, self.index_key), []
        loss = {"kl_weight": 1.0, "record": sums.append}
        output = sparse_attention_with_kl(*leaves, ids, index_lse, self.segments, **self.routes, **loss)
        return [output, *torch.autograd.grad(output, leaves, self.grad), *sums]

    def attend_with_kl(self) -> list[Tensor]:
        """The pattern's ids with a made-up student lse: the time does not depend on it."""
        return self.with_kl(self.ids, self.index_lse)

    def layer_forward(self) -> None:
        self.select()
        self.attend()

    def layer(self) -> None:
        """What a training step runs: the index's own selection is made and timed, the pattern's ids are attended to."""
        self.select()
        self.attend_with_kl()

    def dense(self) -> Tensor:
        lengths = [end - start for start, end in pairwise(self.borders)]
        # split, as slices would each have a gradient of the whole length
        documents = [self.inputs] if len(lengths) == 1 else zip(*(x.split(lengths) for x in self.inputs), strict=True)
        outputs = []
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for document in documents:
                query, key, value = (tensor.transpose(0, 1)[None] for tensor in document)
                output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                outputs.append(output[0].transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def dense_and_back(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.dense(), self.inputs, self.grad)

    def reverse_index(self) -> None:
        query_table, block_table = document_tables(self.segments, BLOCK_SIZE, DEVICE)
        sizes = {"block_size": BLOCK_SIZE, "query_chunk": 16384, "item_queries": 512}
        build_reverse_index(self.ids, query_table, len(block_table), **sizes)

    def worst_error(self) -> float:
        """Largest ||triton - reference|| / ||reference|| of output, gradients and KL on the index's own selection."""
        ids, index_lse = self.select()
        ours = self.with_kl(ids, index_lse)
        output, lse = self.attend("reference")
        index = (self.index_query, self.index_key)
        teacher = (self.query.detach(), self.key.detach(), lse.detach(), ids, self.segments)
        kl = sparse_indexer_kl(*index, *teacher, block_size=BLOCK_SIZE, backend="reference").double().sum()
        grads = (*torch.autograd.grad(output, self.inputs, self.grad), *torch.autograd.grad(kl, index))
        theirs = [output, *grads, kl]
        return max(
            ((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(ours, theirs, strict=True)
        )


def kept_pairs(num_tokens: int, num_kept: int = NUM_SELECTED) -> int:
    """Visible (query, key) pairs in kept blocks, for one head."""
    total = 0
    for block in range(-(-num_tokens // BLOCK_SIZE)):
        rows = min(BLOCK_SIZE, num_tokens - block * BLOCK_SIZE)
        total += rows * min(block, num_kept - 1) * BLOCK_SIZE + rows * (rows + 1) // 2
    return total


def pairs_of(stage: str, lengths: Sequence[int]) -> int:
    """(query, key) pairs of one head that a stage has to look at."""
    if stage.startswith("dense"):
        return sum(length * (length + 1) // 2 for length in lengths)
    return sum(kept_pairs(length) for length in lengths)


def floor_ms(stage: str, lengths: Sequence[int], num_heads: int, num_groups: int) -> float:
    """Time of a stage's multiply-adds at the matmul rate, or of its slots at the copy rate, whichever is longer."""
    if stage == "select":
        return 2.0 * INDEX_DIM * num_groups * pairs_of("dense", lengths) / MATMUL_TFLOPS / 1e9
    if stage == "reverse_index":
        return sum(lengths) * num_groups * NUM_SELECTED * 4 * 2 / COPY_TBS / 1e9
    pairs, long = pairs_of(stage, lengths), sum(length for length in lengths if length > DENSE_UP_TO)
    slots_ms = 0.0 if stage.startswith("dense") else 2 * 2 * NUM_SELECTED * long * num_heads * HEAD_DIM / COPY_TBS / 1e9
    forward, whole = (flops * num_heads * HEAD_DIM * pairs / MATMUL_TFLOPS / 1e9 for flops in (4.0, 14.0))
    backward, forward = max(whole - forward, slots_ms), max(forward, slots_ms)
    kl = 6.0 * INDEX_DIM * num_groups * pairs / MATMUL_TFLOPS / 1e9
    select = floor_ms("select", lengths, num_heads, num_groups)
    return {
        "dense_fwd": forward,
        "dense_fwd_bwd": forward + backward,
        "sparse_fwd": forward,
        "sparse_fwd_bwd": forward + backward,
        "layer_fwd": forward + select,
        "with_kl": forward + backward + kl,
        "layer": forward + backward + kl + select,
    }[stage]


def bench(
    layer: Layer, heads: tuple[int, int], pattern: str, repeats: int, *, forward_only: bool = False
) -> list[dict]:
    lengths, num_tokens = [end - start for start, end in pairwise(layer.borders)], layer.borders[-1]
    stages: dict[str, Callable[[], Any]] = {
        "select": layer.select,
        "sparse_fwd": layer.attend,
        "dense_fwd": layer.dense,
    }
    if forward_only:
        stages |= {"layer_fwd": layer.layer_forward}
    else:
        stages |= {
            "reverse_index": layer.reverse_index,
            "sparse_fwd_bwd": layer.attend_and_back,
            "with_kl": layer.attend_with_kl,
            "layer": layer.layer,
            "dense_fwd_bwd": layer.dense_and_back,
        }
    rows: dict[str, dict[str, Any]] = {}
    for stage, run in stages.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        row: dict[str, Any] = {
            "heads": "{}/{}".format(*heads),
            "n_tokens": num_tokens,
            "pattern": pattern,
            "stage": stage,
        }
        if num_tokens <= GRAPH_TOKENS:
            ms = graph_milliseconds(run, repeats)
        else:
            ms = milliseconds(run, repeats, warm_up=num_tokens <= WARM_TOKENS)
        row["ms"] = round(ms, 4)
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        row["share_of_floor"] = round(floor_ms(stage, lengths, *heads) / row["ms"], 3)
        if stage in ATTENTION_FLOPS:
            flops = ATTENTION_FLOPS[stage] * heads[0] * HEAD_DIM * pairs_of(stage, lengths)
            row["tflops"] = round(flops / row["ms"] / 1e9, 1)
        if stage == "select":
            flops = 2.0 * INDEX_DIM * heads[1] * pairs_of("dense", lengths)
            row["tflops"] = round(flops / row["ms"] / 1e9, 1)
        rows[stage] = row

    def ratio(dense: str, ours: str) -> float:
        return round(rows[dense]["ms"] / rows[ours]["ms"], 2)

    rows["sparse_fwd"]["dense_ratio"] = ratio("dense_fwd", "sparse_fwd")
    if forward_only:
        rows["layer_fwd"]["layer_ratio"] = ratio("dense_fwd", "layer_fwd")
    else:
        rows["sparse_fwd_bwd"]["dense_ratio"] = ratio("dense_fwd_bwd", "sparse_fwd_bwd")
        rows["layer"]["layer_ratio"] = ratio("dense_fwd_bwd", "layer")
        kl_ms = rows["with_kl"]["ms"] - rows["sparse_fwd_bwd"]["ms"]
        rows["layer"]["kl_share"] = round(kl_ms / rows["layer"]["ms"], 3)
    return list(rows.values())


def trained_selection(path: Path, num_groups: int) -> Tensor:
    """Selections of a model, its groups repeated or cut to `num_groups`."""
    saved = torch.load(path, map_location=DEVICE)
    return saved.repeat_interleave(-(-num_groups // saved.shape[1]), 1)[:, :num_groups].contiguous()


def markdown(header: dict[str, str], rows: list[dict[str, Any]]) -> str:
    columns = ("heads", "n_tokens", "pattern", "stage", "ms", "tflops", "share_of_floor", "dense_ratio")
    columns = (*columns, "layer_ratio", "kl_share", "peak_gib")
    lines = ["# A sparse layer's kernels", "", *(f"- {name}: {value}" for name, value in header.items()), ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [2048, 4096, 8192, 16384, 32768, 65536, 131072]
    names = ["{}/{}".format(*shape) for shape in HEAD_SHAPES]
    parser.add_argument("--heads", nargs="+", default=names, choices=names)
    parser.add_argument("--tokens", type=int, nargs="*", default=lengths)
    parser.add_argument("--patterns", nargs="+", default=["random"], choices=["random", "sink", "tile"])
    parser.add_argument("--trained", type=Path, help="a file of torch.save: int32 [t, g, k] ids of a trained model")
    parser.add_argument("--packs", type=Path, help="a JSON file with `cu_seqlens`, a list of borders")
    parser.add_argument(
        "--forward-only", type=int, nargs="+", default=[], help="lengths of which only forward is timed"
    )
    parser.add_argument("--repeats", type=int, default=5, help="past 64K tokens 3, past 128K and forward only 1")
    parser.add_argument("--output", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    torch.manual_seed(0)
    header = {
        "GPU": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, cuDNN {torch.backends.cudnn.version()}",
        "command": f"python -m msa_pretrain.scripts.bench_kernels {' '.join(sys.argv[1:])}",
    }
    rows: list[dict[str, Any]] = []

    def write() -> None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.with_suffix(".json").write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
        args.output.with_suffix(".md").write_text(markdown(header, rows))

    def measure(heads: tuple[int, int], pattern: str, borders: Sequence[int], ids: Tensor | None, **only: bool) -> None:
        length = borders[-1]
        repeats = args.repeats if length <= 65536 else 3 if length <= 131072 else 1
        found = bench(Layer(borders, *heads, ids), heads, pattern, repeats, **only)
        rows.extend(found)
        ratios = {row["stage"]: row.get("layer_ratio", row.get("dense_ratio")) for row in found}
        print(heads, pattern, length, {row["stage"]: row["ms"] for row in found})
        print({stage: ratio for stage, ratio in ratios.items() if ratio}, flush=True)
        torch.cuda.empty_cache()
        write()  # a run that is cut short leaves what it has

    shapes = [shape for shape in HEAD_SHAPES if "{}/{}".format(*shape) in args.heads]
    for heads in shapes:
        error = max(Layer([0, tokens], *heads).worst_error() for tokens in CHECK_TOKENS)
        header["worst relative error {}/{}".format(*heads)] = f"{error:.2e} at {CHECK_TOKENS} tokens, correct"
        if not error < CHECK_LIMIT:
            raise SystemExit(f"relative error {error:.2e} is past {CHECK_LIMIT}: no timing of a wrong kernel.")
    for heads in shapes:
        for num_tokens in args.tokens:
            for pattern in args.patterns:
                measure(heads, pattern, [0, num_tokens], selection(pattern, num_tokens, heads[1]))
        if args.trained:
            ids = trained_selection(args.trained, heads[1])
            measure(heads, "trained", [0, len(ids)], ids)
        if args.packs:
            for number, borders in enumerate(json.loads(args.packs.read_text())["cu_seqlens"]):
                measure(heads, f"pack {number}", borders, None)
        for num_tokens in args.forward_only:
            ids = selection("random", num_tokens, heads[1])
            measure(heads, "random", [0, num_tokens], ids, forward_only=True)


if __name__ == "__main__":
    main()
