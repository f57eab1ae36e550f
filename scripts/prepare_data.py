"""Turn documents into indexed files that training reads: `<output>/train.{bin,idx,crc,json}` and held-out splits.

    python -m msa_pretrain.scripts.prepare_data --corpus builtin --output runs/data/builtin
    python -m msa_pretrain.scripts.prepare_data --input web.jsonl.zst 'books/*.parquet' --tokenizer my_tokenizer \\
        --held-out valid=0.01 --num-workers 16 --output /data/web
    python -m msa_pretrain.scripts.prepare_data --merge /data/web/train-*.json --output /data/web/train
    python -m msa_pretrain.scripts.prepare_data --verify /data/web/train /data/web/valid
    python -m msa_pretrain.scripts.prepare_data --by-length 8192 32768 --prefix /data/web/train

A finished preparation is recognised by its manifest and reused; one that was killed goes on where it was.
"""

import argparse
import sys
import time
from pathlib import Path

from msa_pretrain.data import combine
from msa_pretrain.data.corpus import DEFAULT_MAX_BYTES
from msa_pretrain.data.documents import TEXT_UNITS
from msa_pretrain.data.indexed import Manifest
from msa_pretrain.data.prepare import Progress, Recipe, prepare, prepare_builtin_corpus

CLEANING = (
    "Neither deduplicates nor decontaminates: run datatrove (huggingface.co/docs/datatrove), NeMo Curator or "
    "text-dedup over the documents first. Equal documents at least never meet across splits."
)


def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    start = time.perf_counter()
    try:
        _run(args)
    except ValueError as err:
        sys.exit(f"prepare_data: {err}")
    print(f"{args.output or 'all'} ready in {time.perf_counter() - start:.1f} s")


def _run(args: argparse.Namespace) -> None:
    if args.verify:
        for prefix in args.verify:
            _report(str(prefix), combine.verify(_prefix(prefix)), "verified")
    elif args.merge:
        _report("merged", combine.merge([_prefix(prefix) for prefix in args.merge], _output(args)))
    elif args.by_length:
        if args.prefix is None:
            raise ValueError("--by-length needs --prefix, the data to sort.")
        for prefix, manifest in combine.split_by_length(_prefix(args.prefix), args.by_length).items():
            _report(str(prefix), manifest)
    elif args.corpus:
        prepared = prepare_builtin_corpus(_output(args), max_bytes=args.max_bytes, overwrite=args.overwrite)
        _report_all(prepared)
    else:
        if args.tokenizer is None:
            raise ValueError("--input needs --tokenizer: byte, a tokenizer.json, or a folder or name of transformers.")
        recipe = Recipe(
            inputs=args.input,
            tokenizer=args.tokenizer,
            eod_token=args.eod_token,
            text_column=args.text_column,
            text_unit=args.text_unit,
            split=args.split,
            held_out=dict(args.held_out),
            shard=args.shard,
        )
        prepared = prepare(
            recipe,
            _output(args),
            num_workers=args.num_workers,
            overwrite=args.overwrite,
            on_progress=_print_progress,
        )
        _report_all(prepared)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=CLEANING, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--input", nargs="+", metavar="X", help="files, folders, patterns, hub:owner/name[:config]")
    what.add_argument("--corpus", choices=["builtin"], help="builtin: the standard library's source, in bytes")
    what.add_argument("--merge", nargs="+", type=Path, metavar="PREFIX", help="join prepared data into --output")
    what.add_argument("--verify", nargs="+", type=Path, metavar="PREFIX", help="read all of prepared data")
    what.add_argument("--by-length", nargs="+", type=int, metavar="TOKENS", help="sort --prefix by document length")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for train.* (--merge: the new prefix)")
    parser.add_argument("--prefix", type=Path, help="of --by-length")
    parser.add_argument("--tokenizer", help="byte, a tokenizer.json, or a folder or hub name of transformers")
    parser.add_argument("--eod-token", help="token that ends a document (default: the tokenizer's end of sequence)")
    parser.add_argument("--text-column", default="text", help="key or column of the text (default: %(default)s)")
    parser.add_argument("--text-unit", choices=TEXT_UNITS, help="what a document of a text file is")
    parser.add_argument("--split", default="train", help="of hub datasets (default: %(default)s)")
    parser.add_argument(
        "--held-out", nargs="+", type=_share, default=[], metavar="NAME=SHARE", help="further splits: valid=0.01"
    )
    parser.add_argument("--num-workers", type=int, default=1, help="processes that tokenize (default: %(default)s)")
    parser.add_argument(
        "--shard", type=_shard, default=(0, 1), metavar="I/N", help="take every N-th file, from the I-th"
    )
    parser.add_argument(
        "--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="limit of --corpus builtin (default: %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace data already in --output")
    return parser


def _output(args: argparse.Namespace) -> Path:
    if args.output is None:
        raise ValueError("--output is missing.")
    return args.output


def _prefix(path: Path) -> Path:
    """A prefix may be given as one of its files, so that shell patterns work."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx", ".crc", ".json") else path


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    return name, float(share)


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    return int(number), int(count)


def _print_progress(progress: Progress) -> None:
    left = "" if progress.seconds_left is None else f", {progress.seconds_left:,.0f} s left"
    print(
        f"{progress.num_documents:,} documents ({progress.documents_per_s:,.0f}/s), {progress.num_tokens:,} tokens "
        f"({progress.tokens_per_s:,.0f}/s){left}",
        flush=True,
    )


def _report_all(prepared: dict[str, tuple[Manifest, bool]]) -> None:
    for split, (manifest, reused) in prepared.items():
        _report(split, manifest, "reused" if reused else "")


def _report(name: str, manifest: Manifest, note: str = "") -> None:
    repaired = f", {manifest.num_repaired_documents} repaired" if manifest.num_repaired_documents else ""
    print(
        f"{name}: {manifest.num_documents} documents ({manifest.num_empty_documents} empty ones skipped{repaired}), "
        f"{manifest.num_tokens} tokens, longest {manifest.longest_document}, {manifest.num_unused_ids} of "
        f"{manifest.vocab_size} ids unused{', ' + note if note else ''}"
    )


if __name__ == "__main__":
    main()
