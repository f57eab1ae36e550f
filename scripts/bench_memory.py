"""Measures what the planner predicts, on one GPU: peak memory, FLOPs, and the rate of the grouped experts.

    python -m msa_pretrain.scripts.bench_memory --output results
    python -m msa_pretrain.scripts.bench_memory --output results --device cpu    # runs everything, tiny, no memory

Trains a few steps through the project's own trainer: the dense baseline, the warm-up and the sparse phase, each without
and with full recompute. Step 1 compiles and makes optimizer states, the last step runs under torch's FLOP counter, the
peak is that of the steps between. Writes memory.json and memory.md. Under four minutes on an H200.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from hydra import compose, initialize_config_module
from torch.utils.flop_counter import FlopCounterMode

from msa_pretrain.data.prepare import prepare_builtin_corpus
from msa_pretrain.model.config import Phase
from msa_pretrain.model.experts import GroupedExperts
from msa_pretrain.model.mcore import transformer_config
from msa_pretrain.model.parallel import distributed, model_parallel
from msa_pretrain.training.config import TrainConfig, load_config
from msa_pretrain.training.planner.activations import Activations
from msa_pretrain.training.planner.hardware import GPUS
from msa_pretrain.training.planner.memory import GIB
from msa_pretrain.training.planner.search import phase_steps, plan
from msa_pretrain.training.planner.stages import held_by_chunk
from msa_pretrain.training.planner.work import grouped_mm_flops, products_done
from msa_pretrain.training.run_folder import RunFolder
from msa_pretrain.training.trainer import Trainer

# As large as the activations are to outweigh the states: 32K tokens of gpu_debug keep 15 GiB. On a CPU: the smallest.
SIZES = {
    "cuda": ["experiment=gpu_debug", "training.seq_length=32768", "training.micro_batch_size=1"],
    "cpu": ["experiment=cpu_smoke", "training.seq_length=64", "training.micro_batch_size=1", "model.num_layers=2"],
}
MICRO_BATCHES = 2
EXPERTS = {
    "cuda": dict(tokens=32768, hidden=3072, ffn=1536, experts=64, topk=8, matmul=8192),
    "cpu": dict(tokens=64, hidden=64, ffn=32, experts=4, topk=2, matmul=256),
}
TARGET = 0.65
"""Share of a plain matrix product's rate that the grouped experts should reach."""


class MeasuredTrainer(Trainer):
    """The trainer, which also takes each step's peak and counts the last step's FLOPs; it writes no checkpoint."""

    def __init__(self, config: TrainConfig, folder: RunFolder) -> None:
        super().__init__(config, folder)
        self.peaks: list[int] = []
        self.counted = 0

    def save(self) -> Path:
        return self.folder.checkpoints

    def _train_step(self, batches: list, phase: Phase) -> None:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if self.state.step + 1 == self.total_steps:
            mapping = {torch.ops.aten._grouped_mm: grouped_mm_flops}
            with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
                super()._train_step(batches, phase)
            by_op = counter.get_flop_counts()["Global"]
            self.counted = sum(by_op.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten._grouped_mm))
        else:
            super()._train_step(batches, phase)
        self.peaks.append(torch.cuda.max_memory_allocated() if on_gpu else 0)


def config_of(
    case: str, recompute: str, folder: Path, sizes: list[str], steps: int, overrides: list[str]
) -> TrainConfig:
    """The run of one case: `steps` steps in one phase."""
    words = [*sizes, *overrides]
    length = int(next(word for word in reversed(words) if word.startswith("training.seq_length=")).split("=")[1])
    micro = int(next(word for word in reversed(words) if word.startswith("training.micro_batch_size=")).split("=")[1])
    total = steps * MICRO_BATCHES * micro * length
    words += [
        *(["attention=dense"] if case == "dense" else []),
        f"training.recompute={recompute}",
        f"training.global_batch_size={MICRO_BATCHES * micro}",
        f"training.total_tokens={total}",
        f"training.warmup_tokens={total if case == 'warmup' else 0}",
        "training.eval_every=0",
        "training.eval_samples=0",
        "training.resume=none",
        "optim.lr_warmup_tokens=0",
        "tracking.wandb='off'",
        "tracking.recall_every=0",
        f"run.dir={folder}",
        f"run.name={case}_{recompute}",
        f"data.train=[{folder}/corpus/train]",
        f"data.valid=[{folder}/corpus/valid]",
        f"data.cache_dir={folder}/cache",
    ]
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        return load_config(compose("pretrain", words), world_size=1)


def measure(config: TrainConfig) -> dict[str, Any]:
    """Train one case; predicted and measured peak in GiB, predicted and counted FLOPs of products with weights."""
    on_gpu, training = torch.cuda.is_available(), config.training
    gc.collect()
    before = 0
    if on_gpu:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    with model_parallel(config.parallel, training.seed):
        folder = RunFolder(config)
        folder.prepare(config, [])
        with folder.capture_logs():
            trainer = MeasuredTrainer(config, folder)
            trainer.run()
        peaks, counted = trainer.peaks[1:-1], trainer.counted
        del trainer
    planned = plan(config, 1, GPUS["h200"])
    phase = next(iter(phase_steps(config)))
    activations = Activations(config.spec, planned.layout, planned.load.tokens(config.spec), phase)
    flops = MICRO_BATCHES * products_done(activations, held_by_chunk(config.spec)[0][0])
    row: dict[str, Any] = {"phase": phase.name, "recompute": training.recompute.name}
    row |= {"tokens": training.seq_length * training.micro_batch_size, "predicted_gib": planned.peak.total / GIB}
    row |= {"low_gib": planned.peak.low / GIB, "high_gib": planned.peak.high / GIB, "during": planned.peak.during}
    row |= {"states_gib": planned.peak.states.total / GIB, "activations_gib": planned.peak.activations / GIB}
    measured = (max(peaks) - before) / GIB if on_gpu else None
    row |= {"measured_gib": measured, "held_before_gib": before / GIB if on_gpu else None}
    row["measured_over_predicted"] = measured / row["predicted_gib"] if measured else None
    row |= {"predicted_flops": flops, "counted_flops": counted, "counted_over_predicted": counted / flops}
    return row | {"seconds": time.perf_counter() - start}


def milliseconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median after one warm-up; by CUDA events on a GPU."""
    times = []
    for _ in range(repeats + 1):
        if torch.cuda.is_available():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        else:
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
    return median(times[1:])


def bench_experts(
    config: TrainConfig, tokens: int, hidden: int, ffn: int, experts: int, topk: int, matmul: int
) -> dict:
    """TFLOP/s of GroupedExperts, forward and forward + backward, beside those of a plain product, bf16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = transformer_config(config.spec)
    base.hidden_size, base.moe_ffn_hidden_size, base.params_dtype = hidden, ffn, torch.bfloat16
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    module: Any = GroupedExperts(experts, base, pg_collection=SimpleNamespace(ep=alone, expt_dp=alone, expt_tp=alone))
    module.to(device)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rows = tokens * topk
    counts = torch.multinomial(torch.ones(experts), rows, replacement=True).bincount(minlength=experts)
    inputs = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(rows, device=device).requires_grad_()
    grad = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    leaves = [inputs, probs, *module.parameters()]

    def forward_and_backward() -> None:
        torch.autograd.grad(module(inputs, counts, probs)[0], leaves, grad)

    left = torch.randn(matmul, matmul, device=device, dtype=torch.bfloat16)
    flops = 2.0 * rows * 3 * hidden * ffn
    times = {
        "forward": (milliseconds(lambda: module(inputs, counts, probs)), flops),
        "forward_backward": (milliseconds(forward_and_backward), 3 * flops),
        "matmul": (milliseconds(lambda: left @ left), 2.0 * matmul**3),
    }
    row: dict[str, Any] = dict(tokens=tokens, hidden=hidden, ffn=ffn, experts=experts, topk=topk, matmul_size=matmul)
    for name, (ms, work) in times.items():
        row |= {f"{name}_ms": ms, f"{name}_tflops": work / ms / 1e9}
    backward = times["forward_backward"][0] - times["forward"][0]
    row |= {"backward_ms": backward, "backward_tflops": 2 * flops / backward / 1e9}
    for name in ("forward", "backward", "forward_backward"):
        row[f"{name}_share"] = row[f"{name}_tflops"] / row["matmul_tflops"]
    return row | {"target_share": TARGET}


def markdown(header: dict[str, str], rows: list[dict[str, Any]], experts: dict[str, Any]) -> str:
    lines = ["# Predicted and measured", "", *(f"- {name}: {value}" for name, value in header.items()), ""]
    columns = ("phase", "recompute", "tokens", "predicted GiB (low, high)", "measured GiB", "measured / predicted")
    lines += ["| " + " | ".join((*columns, "FLOPs counted / predicted")) + " |", "|" + "---|" * 7]
    for row in rows:
        predicted = f"{row['predicted_gib']:.2f} ({row['low_gib']:.2f}, {row['high_gib']:.2f})"
        measured = "not measured" if row["measured_gib"] is None else f"{row['measured_gib']:.2f}"
        ratio = "" if row["measured_over_predicted"] is None else f"{row['measured_over_predicted']:.3f}"
        cells = (row["phase"], row["recompute"], f"{row['tokens']:,}", predicted, measured, ratio)
        lines.append("| " + " | ".join((*cells, f"{row['counted_over_predicted']:.6f}")) + " |")
    lines += [
        "",
        "FLOPs: products with weights of one step (mm and grouped_mm). Attention ops are single operations to torch's",
        "counter and left out; on a CPU the reference's index scores are mm as well and come on top of the prediction.",
        "",
        "Experts ({experts} of {ffn}, hidden {hidden}, {tokens:,} tokens x {topk}), against a plain product of "
        "{matmul_size}^3 at {matmul_tflops:.1f} TFLOP/s:".format(**experts),
        "",
        "| | ms | TFLOP/s | share |",
        "|---|---|---|---|",
    ]  # fmt: skip
    for name in ("forward", "backward", "forward_backward"):
        values = (experts[f"{name}_ms"], experts[f"{name}_tflops"], experts[f"{name}_share"])
        lines.append("| {} | {:.2f} | {:.1f} | {:.0%} |".format(name.replace("_", " + "), *values))
    return "\n".join([*lines, "", f"Target: {TARGET:.0%}."]) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of memory.json and memory.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=4, help="of each case, at least 3")
    parser.add_argument("overrides", nargs="*", help="config overrides, such as training.seq_length=16384")
    args = parser.parse_args(argv)
    if args.steps < 3:
        parser.error(f"--steps ({args.steps}) must be at least 3: one to warm up, one to measure, one to count.")
    if (args.device == "cuda") != torch.cuda.is_available():
        parser.error(f"--device {args.device}, but torch {'sees a' if args.device == 'cpu' else 'sees no'} CUDA GPU.")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as training/launch.py does
    header = {
        "GPU": torch.cuda.get_device_name() if args.device == "cuda" else "none: peak memory is not measured on a CPU",
        "torch": torch.__version__,
        "command": " ".join(["python -m msa_pretrain.scripts.bench_memory --device", args.device, *args.overrides]),
    }
    rows = []
    with tempfile.TemporaryDirectory() as name, distributed():
        folder = Path(name)
        prepare_builtin_corpus(folder / "corpus", max_bytes=4_000_000)
        sizes = SIZES[args.device]
        first = config_of("sparse", "none", folder, sizes, args.steps, args.overrides)
        experts = bench_experts(first, **EXPERTS[args.device])
        print(json.dumps(experts))
        for case in ("dense", "warmup", "sparse"):
            for recompute in ("none", "full"):
                rows.append(measure(config_of(case, recompute, folder, sizes, args.steps, args.overrides)))
                print(json.dumps(rows[-1]))
    args.output.mkdir(parents=True, exist_ok=True)
    result = {"header": header, "rows": rows, "experts": experts}
    (args.output / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.output / "memory.md").write_text(markdown(header, rows, experts))
    print(args.output / "memory.md")


if __name__ == "__main__":
    main()
