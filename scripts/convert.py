"""Hugging Face checkpoints to training checkpoints and back, and the proof that both hold the same model.

    python -m msa_pretrain.scripts.convert import --from /models/Qwen3-8B --to runs/imported/qwen3_8b
    python -m msa_pretrain.scripts.convert verify --hf /models/Qwen3-8B --checkpoint runs/imported/qwen3_8b
    python -m msa_pretrain.scripts.convert export --from runs/mine/checkpoints/step_1000 --to /models/mine \\
        --family minimax_m3 --max-positions 131072

A conversion that was killed leaves `<to>.partial`; the same command goes on there. Only safetensors are read, and no
code that comes with a model is run.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from msa_pretrain.model.config import Precision
from msa_pretrain.model.hf import FAMILIES, ConversionError

GIB = 2**30
DTYPES = {"bf16": Precision.bf16, "fp32": Precision.fp32}


def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    for message in ("Transformer Engine and Apex are not installed", r".*is deprecated", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=message)
    start = time.perf_counter()
    try:
        args.run(args)
    except ConversionError as err:
        sys.exit(f"convert {args.command}: {err}")
    print(f"done in {time.perf_counter() - start:.1f} s")


def _import(args: argparse.Namespace) -> None:
    from msa_pretrain.training.conversion.importing import plan_import, run_import  # Megatron takes seconds

    plan = plan_import(args.source, precision=DTYPES.get(args.dtype), vocab_multiple=args.vocab_multiple)
    print(f"{args.source}: {plan.family.name}, {len(plan.source.folder.entries):,} tensors")
    if plan.ignored:
        print(f"left out: {len(plan.ignored):,} tensors of no use here, {plan.ignored[0]} the first")
    _announce(args.to, plan.total_bytes, plan.peak_bytes)
    with _progress(plan.total_bytes) as advance:
        run_import(plan, args.to, advance)
    attention = " attention=imported attention.indexer_init=random" if plan.spec.msa_layers else ""
    print(
        f"{args.to} is ready. Train from it, in an experiment of your choice, with\n"
        f"  python -m msa_pretrain.scripts.pretrain --config-dir {args.to}/configs experiment=msa_cpt_230b "
        f"model=imported moe=imported{attention} training.init_from={args.to} …"
    )


def _export(args: argparse.Namespace) -> None:
    from msa_pretrain.training.conversion.exporting import ExportChoices, plan_export, run_export

    choices = ExportChoices(
        family=args.family,
        envelope=args.layout == "envelope",
        precision=DTYPES.get(args.dtype),
        vocab_size=args.vocab_size,
        max_positions=args.max_positions,
        max_shard_bytes=int(args.max_shard_gb * 10**9),
        tokenizer=args.tokenizer,
        vision_from=args.vision_from,
    )
    plan = plan_export(args.source, choices)
    for note in plan.notes:
        print(f"note: {note}")
    total = plan.total_bytes
    _announce(args.to, total, plan.peak_bytes)
    with _progress(total) as advance:
        run_export(plan, args.to, advance)
    print(f"{args.to} is ready. Compare it: convert verify --hf {args.to} --checkpoint {args.source}")


def _verify(args: argparse.Namespace) -> None:
    from msa_pretrain.training.conversion.verifying import compare, verify_tensors

    comparison = compare(args.hf, args.checkpoint)
    print(f"names, shapes and configs agree: {len(comparison.source.folder.entries):,} tensors")
    with _progress(comparison.total_bytes) as advance:
        tensors = verify_tensors(comparison, advance)
    if args.checksums:
        args.checksums.write_text(json.dumps({one.name: f"{one.checksum:08x}" for one in tensors}, indent=1) + "\n")
    differing = [f"{one.name}: by up to {one.max_difference:.3g}" for one in tensors if one.max_difference]
    if differing:
        raise ConversionError(f"{len(differing)} of {len(tensors)} tensors differ:", differing[:20])
    print(f"{len(tensors):,} tensors are the same, by value and checksum")
    if not args.no_logits:
        _verify_logits(args)


def _verify_logits(args: argparse.Namespace) -> None:
    import torch

    from msa_pretrain.training.conversion.logits import compare_logits
    from msa_pretrain.training.conversion.verifying import vocabulary_of

    generator = torch.Generator().manual_seed(0)
    vocabulary = vocabulary_of(args.hf)
    prompts = [torch.randint(vocabulary, (length,), generator=generator) for length in args.lengths]
    found = compare_logits(args.hf, args.checkpoint, prompts, trust_remote_code=args.trust_remote_code)
    for one in found:
        print(
            f"logits of {one.length} tokens: differ by up to {one.max_difference:.2g}, "
            f"same choice at {one.same_choice:.2%}"
        )
    if not all(one.max_difference <= args.tolerance for one in found):
        raise ConversionError(f"the logits differ by more than {args.tolerance}. The two are not the same model.")


def _announce(to: Path, total: int, peak: int) -> None:
    program = psutil.Process(os.getpid()).memory_info().rss
    print(
        f"{to}: {total / GIB:.2f} GiB to write; peak host memory {(program + peak) / GIB:.2f} GiB, "
        f"{program / GIB:.2f} of it this program"
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    bring = commands.add_parser("import", help="a Hugging Face folder to a training checkpoint")
    bring.add_argument("--from", dest="source", type=Path, required=True, metavar="FOLDER")
    bring.add_argument("--to", type=Path, required=True, metavar="CHECKPOINT")
    bring.add_argument("--dtype", choices=DTYPES, help="of the weights; theirs by default, bf16 for FP8")
    bring.add_argument("--vocab-multiple", type=int, default=1, help="pad the vocabulary for tensor parallelism")
    bring.set_defaults(run=_import)

    write = commands.add_parser("export", help="a training checkpoint to a Hugging Face folder")
    write.add_argument("--from", dest="source", type=Path, required=True, metavar="CHECKPOINT")
    write.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    write.add_argument("--family", choices=FAMILIES, required=True, help="the format")
    write.add_argument("--max-positions", type=int, required=True, help="the context length that config.json names")
    write.add_argument(
        "--layout",
        choices=("envelope", "text"),
        default="envelope",
        help="of minimax_m3: vision-language, or text alone",
    )
    write.add_argument("--dtype", choices=DTYPES, help="of the weights; the checkpoint's by default")
    write.add_argument("--vocab-size", type=int, help="cut padding rows off; known of an imported checkpoint")
    write.add_argument("--max-shard-gb", type=float, default=5.0)
    write.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="its tokenizer and special token ids go along")
    write.add_argument("--vision-from", type=Path, metavar="FOLDER", help="a MiniMax-M3 release: its tower goes along")
    write.set_defaults(run=_export)

    check = commands.add_parser("verify", help="compare the two on disk, and their logits")
    check.add_argument("--hf", type=Path, required=True, metavar="FOLDER")
    check.add_argument("--checkpoint", type=Path, required=True, metavar="CHECKPOINT")
    check.add_argument("--checksums", type=Path, metavar="FILE", help="write the CRC-32 of every tensor here, as JSON")
    check.add_argument("--no-logits", action="store_true", help="which need both models in memory, in fp32")
    check.add_argument("--lengths", type=int, nargs="+", default=[7, 64, 300], help="of the prompts, in tokens")
    check.add_argument("--tolerance", type=float, default=1e-4, help="of the logits")
    check.add_argument("--trust-remote-code", action="store_true", help="let transformers run code of the folder")
    check.set_defaults(run=_verify)
    return parser


if __name__ == "__main__":
    main()
