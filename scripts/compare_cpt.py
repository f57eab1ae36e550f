"""MSA-CPT in miniature: a dense model goes on as MSA or as it was; the numbers of docs/results/cpt.md.

    python -m msa_pretrain.scripts.compare_cpt --output docs/results/cpt.json

Trains a small dense model on the built-in corpus, then, from its checkpoint and for every seed, three continuations on
the same data with the same schedule: dense, and MSA with `attention.indexer_init` random and from_attention, a warm-up
and then sparse. The index branch is new, the optimizer starts anew in all three, and Adam's steps of the backbone are
the same in warm-up, whatever the index does. Runs are continued when the same command is given again.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from pathlib import Path

from msa_pretrain.data.prepare import prepare_builtin_corpus
from msa_pretrain.training.run_folder import versions
from msa_pretrain.training.sinks import read_metrics

SEQ_LENGTH, BATCH = 256, 4
TOKENS_PER_STEP = SEQ_LENGTH * BATCH
PRETRAIN_STEPS, STEPS, WARMUP_STEPS, EVERY = 400, 160, 80, 20
SMALL = [
    "experiment=cpu_smoke", f"training.seq_length={SEQ_LENGTH}", f"training.micro_batch_size={BATCH}",
    f"training.global_batch_size={BATCH}", f"training.eval_every={EVERY}", "training.eval_samples=32",
    "training.num_threads=1", "tracking.wandb='off'", "tracking.recall_every=0", "tracking.recall_rows=2048",
]  # fmt: skip
DENSE = ["attention=dense", "training.warmup_tokens=0"]
MSA = [f"training.warmup_tokens={WARMUP_STEPS * TOKENS_PER_STEP}", "attention.block_size=8"]
CONTINUED = [
    f"training.total_tokens={STEPS * TOKENS_PER_STEP}", "optim.lr=1e-3", "optim.min_lr=1e-4",
    f"optim.lr_warmup_tokens={10 * TOKENS_PER_STEP}",
]  # fmt: skip
VARIANTS = {
    "dense": DENSE,
    "random": [*MSA, "attention.indexer_init=random"],
    "from_attention": [*MSA, "attention.indexer_init=from_attention"],
}
MEASURES = ("kl", "kl_uniform", "block_recall", "score_recall", "score_recall_skill", "captured_mass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the continuations")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare_cpt"), help="folder (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON of all numbers")
    args = parser.parse_args()
    results = compare(args.runs.resolve(), args.seeds)
    results |= {"command": " ".join(["compare_cpt", *sys.argv[1:]]), "date": datetime.date.today().isoformat()}
    print(table(results))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


def compare(folder: Path, seeds: list[int], overrides: tuple[str, ...] = ()) -> dict:
    """All runs in `folder`; {"seeds": ..., "runs": {variant: {seed: [record of each validation]}}, ...}.

    overrides: of every run, for a smaller one.
    """
    prepare_builtin_corpus(folder / "corpus")
    train(folder, "pretrained", [*DENSE, f"training.total_tokens={PRETRAIN_STEPS * TOKENS_PER_STEP}", *overrides])
    start = [*CONTINUED, f"training.init_from={folder / 'pretrained' / 'checkpoints'}"]
    runs: dict[str, dict[str, list[dict]]] = {variant: {} for variant in VARIANTS}
    for seed in seeds:
        for variant, chosen in VARIANTS.items():
            run = train(folder, f"{variant}_{seed}", [*start, *chosen, f"training.seed={seed}", *overrides])
            runs[variant][str(seed)] = validations(run)
    return {"seeds": seeds, "runs": runs, "versions": versions()}


def train(folder: Path, name: str, overrides: list[str]) -> Path:
    """The folder of run `name`, finished."""
    data = [f"data.{split}=[{folder / 'corpus' / split}]" for split in ("train", "valid")]
    command = [
        sys.executable, "-W", "ignore", "-m", "msa_pretrain.scripts.pretrain", *SMALL, *data, f"run.name={name}",
        f"run.dir={folder}", f"data.cache_dir={folder / 'cache'}", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return folder / name


def validations(run: Path) -> list[dict]:
    """Step, phase, loss and index measures of each validation; at the switch, of both phases."""
    found = []
    for record in read_metrics(run / "metrics.jsonl"):
        if "eval/valid/lm_loss" in record:
            measured = {key.removeprefix("eval/valid/"): value for key, value in record.items() if "eval/valid/" in key}
            found.append({"step": record["step"], **measured})
    return found


def table(results: dict) -> str:
    """Markdown: the losses at the end, and the index along the warm-up, as means over seeds with their range."""
    runs, seeds = results["runs"], [str(seed) for seed in results["seeds"]]
    lines = [
        "| continuation | valid LM loss at the end, by seed | mean | against dense, by seed |",
        "|---|---|---|---|",
    ]
    last = {variant: [by_seed[seed][-1]["lm_loss"] for seed in seeds] for variant, by_seed in runs.items()}
    for variant, losses in last.items():
        apart = [f"{ours / dense - 1:+.2%}" for ours, dense in zip(losses, last["dense"], strict=True)]
        lines.append(
            f"| {variant} | {', '.join(f'{loss:.4f}' for loss in losses)} | {statistics.mean(losses):.4f} | "
            f"{', '.join(apart)} |"
        )
    lines += ["", "| step | init | KL | of a uniform index | block recall | score recall | skill | captured mass |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for number, first in enumerate(runs["random"][seeds[0]]):
        for variant in ("random", "from_attention"):
            records = [runs[variant][seed][number] for seed in seeds]
            cells = [spread([record[name] for record in records]) for name in MEASURES if name in first]
            switch = " (sparse from here)" if "lm_loss_sparse" in first else ""
            lines.append(f"| {first['step']}{switch} | {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
