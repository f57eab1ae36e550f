"""Trains one small model in every two-GPU layout and compares it with one GPU: loss and KL curves, step time, memory.

    python -m msa_pretrain.scripts.bench_layouts --output docs/results
    python -m msa_pretrain.scripts.bench_layouts --output out --device cpu    # tiny, over gloo: does everything run?

Half of the steps are warm-up, half sparse, with the same global batch in every layout. A layout is a job of its own, so
that one which fails or hangs is reported and the others go on; no job starts, or runs on, past --limit-s. The two jobs
of one GPU run side by side. Data is the built-in corpus, packed. Writes layouts.json (every series) and layouts.md.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_module

from msa_pretrain.data.prepare import prepare_builtin_corpus
from msa_pretrain.model.parallel import distributed, model_parallel
from msa_pretrain.training.config import load_config
from msa_pretrain.training.run_folder import RunFolder
from msa_pretrain.training.sinks import read_metrics
from msa_pretrain.training.trainer import Trainer

P = "parallel."
SERIES = ("train/lm_loss", "indexer/kl", "optim/grad_norm", "optim/indexer_grad_norm", "perf/step_s")
COMPARED = SERIES[:4]
EARLY = 4
"""Steps before rounding has had time to grow."""
STARTING = 3
"""Steps at the start of a phase whose time is left out: they compile and allocate."""


@dataclass(frozen=True)
class Size:
    """What a device trains: a short sequence with several micro-batches, and a long one with a single."""

    experiment: str
    short: tuple[int, int]
    """(sequence length, global batch)"""
    long: tuple[int, int]
    corpus_bytes: int
    overrides: tuple[str, ...] = ()


SIZES = {
    "cuda": Size("gpu_debug", short=(8192, 4), long=(65536, 1), corpus_bytes=4_000_000),
    "cpu": Size("cpu_smoke", short=(64, 4), long=(256, 1), corpus_bytes=200_000, overrides=("training.num_threads=1",)),
}


@dataclass(frozen=True)
class Job:
    name: str
    gpus: int
    reference: str
    overrides: tuple[str, ...] = ()
    is_long: bool = False


REFERENCES = (Job("1 GPU", 1, "1 GPU"), Job("1 GPU, long", 1, "1 GPU, long", is_long=True))
LAYOUTS = (
    Job("CP=2, long", 2, "1 GPU, long", (f"{P}context=2",), is_long=True),
    Job("TP=2 with SP", 2, "1 GPU", (f"{P}tensor=2", f"{P}sequence=true")),
    Job("EP=2", 2, "1 GPU", (f"{P}expert=2",)),
    Job("PP=2", 2, "1 GPU", (f"{P}pipeline=2",)),
    Job("DP=2", 2, "1 GPU"),
)


def overrides_of(job: Job, size: Size, steps: int, folder: Path) -> list[str]:
    length, batch = size.long if job.is_long else size.short
    tokens = length * batch
    return [
        f"experiment={size.experiment}",
        *size.overrides,
        f"training.seq_length={length}",
        "training.micro_batch_size=1",
        f"training.global_batch_size={batch}",
        f"training.total_tokens={steps * tokens}",
        f"training.warmup_tokens={steps // 2 * tokens}",
        "training.eval_every=0",
        "training.eval_samples=0",
        "training.resume=none",
        f"optim.lr_warmup_tokens={max(steps // 6, 1) * tokens}",
        "checkpoint.every_steps=0",
        "tracking.wandb='off'",
        "tracking.recall_every=0",
        f"run.dir={folder}/runs",
        f"run.name={folder_name(job)}",
        f"data.train=[{folder}/corpus/train]",
        f"data.valid=[{folder}/corpus/valid]",
        f"data.cache_dir={folder}/cache/{folder_name(job)}",
        *job.overrides,
    ]


def folder_name(job: Job) -> str:
    return job.name.lower().replace(" ", "_").replace("=", "").replace(",", "")


class UnsavedTrainer(Trainer):
    """The trainer without checkpoints, whose writing would take longer than the steps."""

    def save(self) -> Path:
        return self.folder.checkpoints


def work(words: list[str]) -> None:
    """What each process of a job does: train, then leave its peak memory in the run folder."""
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        config = load_config(compose("pretrain", words), world_size=int(os.environ.get("WORLD_SIZE", 1)))
    # as training/launch.py does
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.parallel.tensor > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with distributed(), model_parallel(config.parallel, config.training.seed):
        folder = RunFolder(config)
        folder.prepare(config, [])
        UnsavedTrainer(config, folder).run()
        on_gpu = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
        (folder.path / f"peak_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(peak))


class Running:
    """A started job, with its output in a file."""

    def __init__(self, job: Job, words: list[str], folder: Path, gpu: int) -> None:
        self.job, self.run, self.began = job, folder / "runs" / folder_name(job), time.perf_counter()
        self.log = folder / f"{folder_name(job)}.log"
        parallel = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={job.gpus}"]
        command = [
            *(sys.executable, "-W", "ignore", *(parallel if job.gpus > 1 else [])),
            *("-m", "msa_pretrain.scripts.bench_layouts", "--work", *words),
        ]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        one_gpu = {"CUDA_VISIBLE_DEVICES": visible[gpu % len(visible)]} if job.gpus == 1 else {}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **one_gpu}
            )

    def result(self, deadline: float) -> dict[str, Any]:
        """Series and peaks, or the end of the job's output as `error`; kills the job at `deadline`."""
        row: dict[str, Any] = {"name": self.job.name, "gpus": self.job.gpus, "reference": self.job.reference}
        row["overrides"] = list(self.job.overrides)
        try:
            code = self.process.wait(timeout=max(deadline - time.perf_counter(), 0.0))
            failure = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            failure = "stopped: no time left (--limit-s)"
            self._stop()
        row["job_s"] = time.perf_counter() - self.began
        metrics = self.run / "metrics.jsonl"
        steps = [record for record in read_metrics(metrics) if SERIES[0] in record] if metrics.is_file() else []
        row["phase"] = [record["train/phase"] for record in steps]
        row["series"] = {key: [record[key] for record in steps] for key in SERIES}
        row["tokens_per_step"] = steps[0]["train/tokens"] if steps else None
        row["peak_gib"] = [json.loads(path.read_text()) for path in sorted(self.run.glob("peak_*.json"))]
        if failure:
            row["error"] = f"{failure}\n{self.log.read_text()[-3000:]}"
        return row

    def _stop(self) -> None:
        self.process.terminate()  # torchrun takes its processes down with it, which it could not after a kill
        try:
            self.process.wait(timeout=40)  # it gives them 30 s
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_jobs(size: Size, steps: int, folder: Path, deadline: float) -> list[dict[str, Any]]:
    rows = []
    for group in (REFERENCES, *((job,) for job in LAYOUTS)):
        started = []
        for gpu, job in enumerate(group):
            if time.perf_counter() < deadline:
                started.append(Running(job, overrides_of(job, size, steps, folder), folder, gpu))
            else:
                row = {"name": job.name, "gpus": job.gpus, "reference": job.reference}
                rows.append(row | {"phase": [], "series": {}, "peak_gib": [], "error": "not started: no time left"})
        for running in started:
            rows.append(running.result(deadline))
            print(summary(rows[-1]), flush=True)
    return rows


def summary(row: dict[str, Any]) -> str:
    end = row["error"] if "error" in row else f"loss {row['series']['train/lm_loss'][-1]:.4f}"
    return f"{row['name']}: {len(row['phase'])} steps, {row.get('job_s', 0):.0f} s, {end}"


def of_phase(row: dict[str, Any], key: str, phase: str, skip: int = 0) -> list[float]:
    values = row["series"].get(key, [])
    return [value for value, its in zip(values, row["phase"], strict=True) if its == phase][skip:]


def difference(row: dict[str, Any], reference: dict[str, Any], key: str, phase: str, steps: int | None = None) -> str:
    """Largest relative difference over the first `steps` that both have."""
    pairs = list(zip(of_phase(row, key, phase)[:steps], of_phase(reference, key, phase)[:steps], strict=False))
    return f"{max(abs(ours - other) / abs(other) for ours, other in pairs):.1e}" if pairs else "–"


def step_time(row: dict[str, Any], phase: str) -> str:
    times = of_phase(row, "perf/step_s", phase, skip=STARTING)
    return f"{median(times):.3f}" if times else "–"


def markdown(header: dict[str, str], size: Size, rows: list[dict[str, Any]]) -> str:
    by_name = {row["name"]: row for row in rows}
    (short, batch), (long, _) = size.short, size.long
    lines = [
        "# Layouts of two GPUs against one",
        "",
        *(f"- {name}: {value}" for name, value in header.items()),
        "",
        f"`{size.experiment}`, {batch} x {short:,} tokens a step (`long`: 1 x {long:,}), packed documents, warm-up in",
        "the first half of the steps. Differences are the largest relative ones to one GPU over the steps of a phase,",
        f"warm-up / sparse; seconds are medians after a phase's first {STARTING} steps. Past the first {EARLY} steps",
        "bf16 rounding of unlike sums grows with each large step of the rate's warm-up. All series: `layouts.json`.",
        "",
        f"| layout | steps | last loss | first {EARLY}: loss / KL | loss | KL | grad norm | index grad norm | s/step "
        "| peak GiB, by rank |",
        "|" + "---|" * 10,
    ]
    phases = ("warmup", "sparse")
    for row in rows:
        reference = by_name[row["reference"]]
        losses = row["series"].get(SERIES[0])
        cells = [row["name"], str(len(row["phase"])), f"{losses[-1]:.4f}" if losses else "–"]
        if row is reference:
            cells += [""] * (1 + len(COMPARED))
        else:
            cells += [" / ".join(difference(row, reference, key, "warmup", EARLY) for key in SERIES[:2])]
            cells += [" / ".join(difference(row, reference, key, phase) for phase in phases) for key in COMPARED]
        cells += [" / ".join(step_time(row, phase) for phase in phases)]
        cells += [", ".join("not measured" if peak is None else f"{peak:.2f}" for peak in row["peak_gib"]) or "–"]
        lines.append("| " + " | ".join(cells) + " |")
    failed = [row for row in rows if "error" in row]
    for row in failed:
        lines += ["", f"**{row['name']} failed:**", "```", row["error"], "```"]
    return "\n".join(lines) + "\n"


def header_of(device: str, argv: list[str]) -> dict[str, str]:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton", "megatron-core")]
    hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if device == "cuda" else "none, gloo"
    return {
        "GPUs": hardware,
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "date": date.today().isoformat(),
        "command": f"`{shlex.join(['python', '-m', 'msa_pretrain.scripts.bench_layouts', *argv])}`",
        "NCCL settings": " ".join(f"{key}={value}" for key, value in os.environ.items() if key.startswith("NCCL_"))
        or "none",
    }


def main(argv: list[str]) -> None:
    if argv[:1] == ["--work"]:
        work(argv[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of layouts.json and layouts.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=30, help="of each job, even")
    parser.add_argument("--limit-s", type=float, default=360.0, help="seconds for all jobs together")
    args = parser.parse_args(argv)
    if args.steps < 2 or args.steps % 2:
        parser.error(f"--steps ({args.steps}) must be even and at least 2: half of them warm up the index branch.")
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        parser.error(f"--device cuda needs two GPUs, and torch sees {torch.cuda.device_count()}. Use --device cpu.")
    deadline = time.perf_counter() + args.limit_s
    size = SIZES[args.device]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_builtin_corpus(folder / "corpus", max_bytes=size.corpus_bytes)
        rows = run_jobs(size, args.steps, folder, deadline)
    header = header_of(args.device, argv)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "layouts.json").write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    (args.output / "layouts.md").write_text(markdown(header, size, rows))
    print(args.output / "layouts.md")
    if any("error" in row for row in rows):
        raise SystemExit("some layouts failed; see the report.")


if __name__ == "__main__":
    main(sys.argv[1:])
