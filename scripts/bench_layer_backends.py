"""Measures `model.backend=transformer_engine` against torch on one GPU: errors, speed, and a model trained with both.

    python -m msa_pretrain.scripts.bench_layer_backends --output results
    python -m msa_pretrain.scripts.bench_layer_backends --output results --device cpu   # torch alone, tiny: a rehearsal

Experts: 64 of 1536, hidden 3072, 32K tokens x 8, under even, random and uneven loads, with Transformer Engine's cuBLAS
and its CUTLASS kernels (NVTE_USE_CUTLASS_GROUPED_GEMM=1), beside a plain product's rate in the same run. Then norm and
linear layer, and gpu_debug trained for some steps. Writes layer_backends.json and .md. About two minutes on an H200.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from msa_pretrain.data.prepare import prepare_builtin_corpus
from msa_pretrain.model.backend import layer_modules
from msa_pretrain.model.config import LayerBackend
from msa_pretrain.model.experts import GroupedExperts
from msa_pretrain.model.mcore import transformer_config
from msa_pretrain.model.parallel import distributed, model_parallel
from msa_pretrain.scripts.bench_memory import EXPERTS, SIZES, config_of, milliseconds
from msa_pretrain.training.machine import transformer_engine_problem
from msa_pretrain.training.run_folder import RunFolder
from msa_pretrain.training.sinks import read_metrics
from msa_pretrain.training.trainer import Trainer

CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"
# name -> (backend, value of that variable)
KINDS = {"torch": ("torch", "0"), "TE, cuBLAS": ("transformer_engine", "0"), "TE, CUTLASS": ("transformer_engine", "1")}
STEPS = {"cuda": 12, "cpu": 3}


class TrainerWithoutCheckpoint(Trainer):
    def save(self) -> Path:
        return self.folder.checkpoints


def kinds(device: torch.device) -> list[str]:
    return list(KINDS) if device.type == "cuda" else ["torch"]


def backends(device: torch.device) -> list[LayerBackend]:
    return list(LayerBackend) if device.type == "cuda" else [LayerBackend.torch]


def loads(rows: int, experts: int) -> dict[str, Tensor]:
    """Rows of each expert: all alike; drawn at random; by 1/rank, an eighth of the experts left out."""
    generator = torch.Generator().manual_seed(0)
    even = torch.full((experts,), rows // experts)
    even[0] += rows - int(even.sum())
    drawn = torch.multinomial(torch.ones(experts), rows, replacement=True, generator=generator).bincount(
        minlength=experts
    )
    share = 1.0 / torch.arange(1, experts + 1)
    share[-experts // 8 :] = 0.0
    uneven = (share / share.sum() * rows).long()
    uneven[0] += rows - int(uneven.sum())
    return {"even": even, "random": drawn, "uneven": uneven[torch.randperm(experts, generator=generator)]}


def build_experts(config: Any, sizes: dict[str, int], device: torch.device) -> GroupedExperts:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups: Any = SimpleNamespace(ep=alone, expt_dp=alone, expt_tp=alone)
    config.hidden_size, config.moe_ffn_hidden_size = sizes["hidden"], sizes["ffn"]
    module = GroupedExperts(sizes["experts"], config, groups)
    torch.manual_seed(0)
    for parameter in module.to(device).parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def with_product(module: GroupedExperts, kind: str) -> GroupedExperts:
    backend, os.environ[CUTLASS] = KINDS[kind]
    module.grouped_product = layer_modules(LayerBackend[backend]).grouped_product
    return module


def gradients(module: GroupedExperts, counts: Tensor, inputs: Tensor, probs: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [inputs.detach().requires_grad_(), probs.detach().requires_grad_(), *module.parameters()]
    output, _ = module(leaves[0], counts, leaves[1])
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def errors(config: Any, device: torch.device) -> list[dict[str, Any]]:
    """Relative error in the norm against fp64, of output and gradients of small experts, for each kind and load."""
    sizes = dict(hidden=512, ffn=256, experts=16) if device.type == "cuda" else dict(hidden=32, ffn=16, experts=8)
    rows, table = 64 * sizes["experts"], []
    inputs, probs, grad = torch.randn(rows, sizes["hidden"]), torch.rand(rows), torch.randn(rows, sizes["hidden"])
    given = [value.bfloat16().to(device) for value in (inputs, probs, grad)]
    for name, counts in loads(rows, sizes["experts"]).items():
        exact = build_experts(config, sizes, device).double()
        exact.grouped_product = one_by_one
        truth = gradients(exact, counts, *(value.double() for value in given))
        for kind in kinds(device):
            found = gradients(with_product(build_experts(config, sizes, device), kind), counts, *given)
            row = {"kind": kind, "load": name}
            for what, value, right in zip(("y", "dx", "dprobs", "dgate_up", "ddown"), found, truth, strict=True):
                row[what] = float((value.double() - right).norm() / right.norm())
            table.append(row)
    return table


def one_by_one(counts: Tensor, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The definition: one product an expert."""

    def product(tokens: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([part @ w.T for part, w in zip(tokens.split(counts.tolist()), weights, strict=True)])

    return product


def speed(config: Any, device: torch.device) -> list[dict[str, Any]]:
    """ms, TFLOP/s and share of a plain product's rate, of the experts forward and forward + backward."""
    sizes = dict(EXPERTS[device.type])
    rows = sizes["tokens"] * sizes["topk"]
    given = [torch.randn(rows, sizes["hidden"], device=device), torch.rand(rows, device=device)]
    inputs, probs, grad = (value.bfloat16() for value in (given[0], given[1], given[0].flip(0)))
    left = torch.randn(sizes["matmul"], sizes["matmul"], device=device, dtype=torch.bfloat16)
    table, flops = [], 2.0 * rows * 3 * sizes["hidden"] * sizes["ffn"]
    module = build_experts(config, sizes, device)
    for name, counts in loads(rows, sizes["experts"]).items():
        for kind in kinds(device):
            with_product(module, kind)

            def forward(counts: Tensor = counts) -> None:
                with torch.no_grad():
                    module(inputs, counts, probs)

            def both(counts: Tensor = counts) -> None:
                gradients(module, counts, inputs, probs, grad)

            rate = 2.0 * sizes["matmul"] ** 3 / milliseconds(lambda: left @ left) / 1e9
            once, twice = milliseconds(forward), milliseconds(both)
            row = {"kind": kind, "load": name, "largest_over_mean": float(counts.max() * len(counts) / rows)}
            row |= {"forward_ms": once, "forward_backward_ms": twice, "matmul_tflops": rate}
            row |= {"forward_tflops": flops / once / 1e9, "forward_backward_tflops": 3 * flops / twice / 1e9}
            row |= {f"{what}_share": row[f"{what}_tflops"] / rate for what in ("forward", "forward_backward")}
            table.append(row)
    return table


def layers(config: Any, device: torch.device) -> list[dict[str, Any]]:
    """ms of the norm and of the QKV projection, forward and backward."""
    sizes, table = EXPERTS[device.type], []
    inputs = torch.randn(sizes["tokens"], 1, sizes["hidden"], device=device, dtype=torch.bfloat16, requires_grad=True)
    for backend in backends(device):
        modules = layer_modules(backend)
        norm = modules.norm(config, sizes["hidden"], 1e-6).to(device)
        options = dict(config=config, init_method=nn.init.normal_, bias=False, is_expert=False, skip_bias_add=False)
        linear = modules.column_linear(sizes["hidden"], 2 * sizes["hidden"], gather_output=False, **options).to(device)
        nn.init.normal_(linear.weight, std=0.02)
        runs = {"norm": (norm, norm), "linear": (linear, lambda values, linear=linear: linear(values)[0])}
        for name, (module, run) in runs.items():
            grad = torch.ones_like(run(inputs))

            def both(run: Any = run, module: nn.Module = module, grad: Tensor = grad) -> None:
                torch.autograd.grad(run(inputs), [inputs, *module.parameters()], grad)

            table.append({"layer": name, "backend": backend.name, "forward_backward_ms": milliseconds(both)})
    return table


def train(backend: LayerBackend, corpus: Path, device: str) -> dict[str, Any]:
    """Losses and step times of gpu_debug (on a CPU: the smallest), in the warm-up phase and on the same data."""
    os.environ[CUTLASS] = "0"
    folder = corpus.parent / backend.name
    folder.mkdir()
    (folder / "corpus").symlink_to(corpus)
    words = [f"model.backend={backend.name}", "training.precision=bf16", "optim.lr=1e-4", "optim.min_lr=1e-5"]
    words += ["training.seq_length=4096", "training.micro_batch_size=2"] if device == "cuda" else []
    config = config_of("warmup", "none", folder, SIZES[device], STEPS[device], words)
    with model_parallel(config.parallel, config.training.seed):
        run = RunFolder(config)
        run.prepare(config, [])
        with run.capture_logs():
            TrainerWithoutCheckpoint(config, run).run()
    records = [record for record in read_metrics(run.path / "metrics.jsonl") if "train/lm_loss" in record]
    row = {key: [record[key] for record in records] for key in ("train/lm_loss", "optim/grad_norm", "perf/step_s")}
    return {"backend": backend.name, **row}


def markdown(header: dict[str, str], result: dict[str, Any]) -> str:
    lines = ["# Transformer Engine beside torch", "", *(f"- {name}: {value}" for name, value in header.items()), ""]
    lines += ["Experts, share of a plain product's rate in the same run:", ""]
    lines += ["| load (largest / mean) | | forward ms | TFLOP/s | share | forward + backward ms | TFLOP/s | share |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in result["speed"]:
        cells = f"| {row['load']} ({row['largest_over_mean']:.1f}) | {row['kind']} "
        for what in ("forward", "forward_backward"):
            cells += f"| {row[f'{what}_ms']:.2f} | {row[f'{what}_tflops']:.0f} | {row[f'{what}_share']:.0%} "
        lines.append(cells + "|")
    lines += ["", "Relative error in the norm against fp64, the experts of a smaller layer in bf16:", ""]
    lines += ["| load | | output | tokens | probabilities | gate and up | down |", "|---|---|---|---|---|---|---|"]
    for row in result["errors"]:
        values = " | ".join(f"{row[what]:.1e}" for what in ("y", "dx", "dprobs", "dgate_up", "ddown"))
        lines.append(f"| {row['load']} | {row['kind']} | {values} |")
    lines += ["", "Other layers, forward and backward:", "", "| layer | backend | ms |", "|---|---|---|"]
    lines += [f"| {row['layer']} | {row['backend']} | {row['forward_backward_ms']:.3f} |" for row in result["layers"]]
    lines += ["", "The same training steps:", ""]
    lines += ["| backend | first and last LM loss | gradient norm, last | s a step, second half |", "|---|---|---|---|"]
    for row in result["training"]:
        losses, norms, times = row["train/lm_loss"], row["optim/grad_norm"], row["perf/step_s"]
        pace = fmean(times[len(times) // 2 :])
        lines.append(f"| {row['backend']} | {losses[0]:.4f}, {losses[-1]:.4f} | {norms[-1]:.4f} | {pace:.3f} |")
    return "\n".join([*lines, "", result["difference"]]) + "\n"


def difference(rows: list[dict[str, Any]]) -> str:
    if len(rows) < 2:
        return "One backend: nothing to compare."
    first, second = (row["train/lm_loss"] for row in rows)
    worst = max(abs(a - b) / b for a, b in zip(second, first, strict=True))
    return f"Largest relative difference of a step's loss: {worst:.1e}."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of layer_backends.json and .md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    if (args.device == "cuda") != torch.cuda.is_available():
        parser.error(f"--device {args.device}, but torch {'sees a' if args.device == 'cpu' else 'sees no'} CUDA GPU.")
    if args.device == "cuda" and (problem := transformer_engine_problem()):
        parser.error(f"model.backend=transformer_engine {problem}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as training/launch.py does
    device = torch.device(args.device)
    header = {
        "GPU": torch.cuda.get_device_name() if args.device == "cuda" else "none: a rehearsal",
        "torch": torch.__version__,
        "command": f"python -m msa_pretrain.scripts.bench_layer_backends --device {args.device}",
    }
    if args.device == "cuda":
        import transformer_engine

        header["Transformer Engine"] = transformer_engine.__version__
    result: dict[str, Any] = {"header": header}
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, distributed():
        folder = Path(name)
        prepare_builtin_corpus(folder / "corpus", max_bytes=4_000_000)
        base = config_of("warmup", "none", folder, SIZES[args.device], 4, ["training.precision=bf16"])
        with model_parallel(base.parallel, 0):
            for what, measure in (("errors", errors), ("speed", speed), ("layers", layers)):
                result[what] = measure(transformer_config(base.spec), device)
                print(what, json.dumps(result[what]), flush=True)
        result["training"] = [train(backend, folder / "corpus", args.device) for backend in backends(device)]
    result["difference"] = difference(result["training"])
    (args.output / "layer_backends.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.output / "layer_backends.md").write_text(markdown(header, result))
    print(args.output / "layer_backends.md")


if __name__ == "__main__":
    main()
