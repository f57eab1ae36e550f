"""Speed and memory of the data path; the rows of docs/results/data.md.

    python -m msa_pretrain.scripts.bench_data prepare     # against the tokenizer's own batch speed, in the same run
    python -m msa_pretrain.scripts.bench_data load        # packs of 128K tokens, against what a GPU consumes
    python -m msa_pretrain.scripts.bench_data end-to-end  # documents of --megabytes -> prepare -> verify -> 100 steps

Documents are sentences of pseudo-words with Zipf frequencies, of log-normal lengths. `prepare` uses a byte-level BPE
trained on them; `end-to-end` uses bytes, so that reading and writing and not the tokenizer are the load, or with
`--tokenizer bpe` that BPE.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil

from msa_pretrain.data.prepare import Recipe, prepare
from msa_pretrain.data.tokenizer import load_tokenizer
from msa_pretrain.data.writer import write_indexed_dataset

EOD = "<eod>"
VOCAB_SIZE = 8192
GPU_TOKENS_PER_S = 66_200  # gpu_debug on one H200, the faster phase: docs/results/gpu_training.md
TINY = [
    "experiment=cpu_smoke", "model.num_layers=2", "model.hidden_size=32", "model.num_query_heads=4", "model.head_dim=8",
    "model.rotary_dim=4", "attention.index_dim=8", "moe.num_experts=4",
    "moe.expert_hidden_size=32", "moe.dense_hidden_size=32", "training.total_tokens=204800", "training.eval_every=100",
    "training.warmup_tokens=102400", "training.num_threads=1", "tracking.wandb='off'",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "load", "end-to-end"])
    parser.add_argument("--megabytes", type=int, help="of documents (default: 4, load: none, end-to-end: 2048)")
    parser.add_argument("--rounds", type=int, help="default: 12, load: 5, end-to-end: none")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--tokenizer", choices=["byte", "bpe"], default="byte", help="of end-to-end")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "load":
            bench_loading(Path(folder), args.rounds or 5)
            return
        default = {"prepare": 4, "end-to-end": 2048}[args.what]
        path = write_documents(Path(folder), (args.megabytes or default) * 2**20)
        if args.what == "prepare":
            bench_preparation(path, args.rounds or 12, args.num_workers)
        else:
            run_end_to_end(path, args.num_workers, args.tokenizer)


def bench_preparation(path: Path, rounds: int, num_workers: int) -> dict[str, float]:
    """Median over rounds of the tokens/s of `prepare` over those of bare batch calls on the same texts.

    A round is short and takes the two in turn, in one order and the next time in the other, so that what else the cores
    do weighs on both alike.
    """
    tokenizer = str(path.with_name("tokenizer.json"))
    recipe = Recipe(inputs=[str(path)], tokenizer=tokenizer, eod_token=EOD)
    with path.open() as file:
        texts = [json.loads(line)["text"] for line in file]
    shares = [texts[number::num_workers] for number in range(num_workers)]
    prepare(recipe, path.with_name("warm-up"))  # the first call imports `datasets`
    _encode(tokenizer, texts[:256])
    one, many = "1 core, CPU time", f"{num_workers} cores, wall time"
    seconds: dict[str, list[tuple[float, float]]] = {one: [], many: []}
    with multiprocessing.get_context("forkserver").Pool(num_workers) as pool:
        pool.starmap(_encode, [(tokenizer, texts[:256])] * num_workers)
        for number in range(rounds):
            seconds[one].append(
                _in_turn(
                    time.process_time,
                    lambda: _encode(tokenizer, texts),
                    lambda n=number: prepare(recipe, path.with_name(f"one{n}")),
                    swapped=number % 2 == 1,
                )
            )
            seconds[many].append(
                _in_turn(
                    time.perf_counter,
                    lambda: pool.starmap(_encode, [(tokenizer, share) for share in shares]),
                    lambda n=number: prepare(recipe, path.with_name(f"many{n}"), num_workers=num_workers),
                    swapped=number % 2 == 1,
                )
            )
    medians = {}
    for name, pairs in seconds.items():
        ratios = sorted(bare / full for bare, full in pairs)
        medians[name] = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        total = sum(bare for bare, _ in pairs) / sum(full for _, full in pairs)
        print(
            f"prepare / tokenizer, {name}: median {medians[name]:.3f} of {rounds} rounds (quartiles {low:.3f} to "
            f"{high:.3f}, range {ratios[0]:.3f} to {ratios[-1]:.3f}); of the sums {total:.3f}"
        )
    num_tokens = _encode(tokenizer, texts)
    bare, full = (num_tokens / statistics.median(column) for column in zip(*seconds[one], strict=True))
    print(f"tokens/s of one core's CPU time: tokenizer {bare:,.0f}, prepare {full:,.0f}; {path.stat().st_size:,} bytes")
    return medians


def bench_loading(folder: Path, rounds: int, seq_length: int = 131_072) -> float:
    """Tokens/s of one process that reads, checks and packs samples, by document length and packing; the lowest."""
    from msa_pretrain.data.dataset import build_dataset
    from msa_pretrain.data.order import Packing
    from msa_pretrain.data.packing import collate

    random, lowest = np.random.default_rng(0), float("inf")
    for mean in (200, 1000, 100_000):
        prefix = folder / f"mean{mean}"

        def documents(mean: int = mean):
            size = 0
            while size < 40 * seq_length:
                ids = random.integers(0, 60_000, max(1, int(random.exponential(mean))))
                size += ids.size + 1
                yield "", ids

        write_indexed_dataset(documents(), prefix, vocab_size=60_000, eod_id=0)
        for packing in Packing:
            start = time.perf_counter()
            dataset = build_dataset(
                [(0, {str(prefix): 1.0})],
                num_samples=30,
                seq_length=seq_length,
                seed=0,
                cache_dir=folder / "cache",
                packing=packing,
            )
            build_s = time.perf_counter() - start
            rates = []
            for _ in range(rounds):
                seconds, _ = _timed(time.process_time, lambda d=dataset: [collate([sample]) for sample in d])
                rates.append(len(dataset) * seq_length / seconds)
            rate = statistics.median(rates)
            lowest = min(lowest, rate)
            print(
                f"documents of {mean} tokens, {packing.name}: {rate:,.0f} tokens/s of one core, "
                f"{rate / GPU_TOKENS_PER_S:.0f} x {GPU_TOKENS_PER_S:,} (order built in {build_s:.2f} s, "
                f"padding {dataset.uses()[0].padding:.3%})"
            )
    return lowest


def run_end_to_end(
    path: Path, num_workers: int, tokenizer: str, overrides: Sequence[str] = (), held_out: float = 0.001
) -> dict[str, int]:
    """Peak memory of each command, bytes: resident sizes of its processes added up, so shared pages count for each.

    overrides: of the training run, on top of a tiny model's. held_out: share of the documents for validation.
    """
    out = path.with_name("out")
    of_bpe = ["--tokenizer", str(path.with_name("tokenizer.json")), "--eod-token", EOD]
    chosen = of_bpe if tokenizer == "bpe" else ["--tokenizer", "byte"]
    size = VOCAB_SIZE if tokenizer == "bpe" else 257
    prepare_data = [sys.executable, "-m", "msa_pretrain.scripts.prepare_data"]
    commands = {
        "prepare": [*prepare_data, "--input", str(path), *chosen, "--output", str(out), "--num-workers",
                    str(num_workers), "--held-out", f"valid={held_out}"],
        "verify": [*prepare_data, "--verify", str(out / "train"), str(out / "valid")],
        "train": [sys.executable, "-W", "ignore", "-m", "msa_pretrain.scripts.pretrain", *TINY, "run.name=bench",
                  f"data.train=[{out / 'train'}]", f"data.valid=[{out / 'valid'}]", f"model.vocab_size={size}",
                  *overrides],
    }  # fmt: skip
    print(f"documents: {path.stat().st_size:,} bytes, tokenizer {tokenizer}")
    peaks = {}
    for name, command in commands.items():
        start = time.perf_counter()
        with path.with_name(f"{name}.log").open("w") as log:
            job = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=path.parent)
            peak = 0
            while job.poll() is None:
                peak = max(peak, _resident(job))
                time.sleep(0.1)
        lines = path.with_name(f"{name}.log").read_text().splitlines()
        if job.returncode:
            raise RuntimeError("\n".join(lines[-30:]))
        peaks[name] = peak
        steps = [line for line in lines if line.startswith("step ")]
        print(f"{name}: peak RSS {peak / 2**20:,.0f} MiB, {time.perf_counter() - start:,.0f} s")
        print("\n".join(f"    {line}" for line in (steps[-1:] if steps else lines[-3:])), flush=True)
    return peaks


def write_documents(folder: Path, num_bytes: int) -> Path:
    """JSON lines of about `num_bytes`, and the tokenizer beside them."""
    import tokenizers

    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
    words = [
        "".join(letters[np.minimum(random.geometric(0.12, size) - 1, 25)]) for size in random.integers(1, 12, 30_000)
    ]
    ranks = 1 / np.arange(1, len(words) + 1)
    cumulative = np.cumsum(ranks / ranks.sum())
    sentences = [
        " ".join(words[index] for index in np.searchsorted(cumulative, random.random(12)).clip(max=len(words) - 1))
        + "."
        for _ in range(50_000)
    ]
    path, written = folder / "documents.jsonl", 0
    sample: list[str] = []
    with path.open("w") as file:
        while written < num_bytes:
            size = max(1, int(random.lognormal(3.0, 1.2)))
            text = " ".join([sentences[index] for index in random.integers(0, len(sentences), size).tolist()])
            sample += [text] if len(sample) < 3000 else []
            written += file.write(json.dumps({"text": text, "id": written}) + "\n")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return path


def _in_turn(
    clock: Callable[[], float], bare: Callable[[], object], full: Callable[[], object], *, swapped: bool
) -> tuple[float, float]:
    """Seconds of `bare` and of `full`."""
    if swapped:
        seconds, _ = _timed(clock, full)
        return _timed(clock, bare)[0], seconds
    seconds, _ = _timed(clock, bare)
    return seconds, _timed(clock, full)[0]


def _encode(tokenizer: str, texts: list[str]) -> int:
    """The bare tokenizer: batches of 256 texts, the ids read, nothing kept; returns the number of tokens."""
    load_tokenizer(tokenizer, EOD)  # one thread, as in every worker of `prepare`
    import tokenizers

    bare = tokenizers.Tokenizer.from_file(tokenizer)
    batches = (texts[start : start + 256] for start in range(0, len(texts), 256))
    return sum(len(one.ids) for batch in batches for one in bare.encode_batch_fast(batch, add_special_tokens=False))


def _timed(clock: Callable[[], float], work: Callable[[], object]) -> tuple[float, int]:
    start = clock()
    result = work()
    return clock() - start, result if isinstance(result, int) else 0


def _resident(job: psutil.Process) -> int:
    total = 0
    try:
        for process in [job, *job.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass  # it ended between the two calls
    return total


if __name__ == "__main__":
    main()
