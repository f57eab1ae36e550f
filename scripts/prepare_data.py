"""Turn a corpus into indexed files that training reads: `<output>/train.{bin,idx,json}` and `<output>/valid.*`.

    python -m msa_pretrain.scripts.prepare_data --corpus builtin --output runs/data/builtin

A finished preparation is recognised by its manifest and reused.
"""

import argparse
import sys
import time
from pathlib import Path

from msa_pretrain.data.corpus import DEFAULT_MAX_BYTES
from msa_pretrain.data.prepare import prepare_builtin_corpus


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prepare indexed training data.")
    parser.add_argument("--corpus", choices=["builtin"], required=True, help="builtin: the standard library's source")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for train.* and valid.*")
    parser.add_argument(
        "--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="upper limit of the corpus (default: %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace data already in --output")
    args = parser.parse_args(argv)

    start = time.perf_counter()
    try:
        prepared = prepare_builtin_corpus(args.output, max_bytes=args.max_bytes, overwrite=args.overwrite)
    except ValueError as err:
        sys.exit(f"prepare_data: {err}")
    for split, (manifest, reused) in prepared.items():
        print(
            f"{split}: {manifest.num_documents} documents ({manifest.num_empty_documents} empty ones skipped), "
            f"{manifest.num_tokens} tokens, longest {manifest.longest_document}{', reused' if reused else ''}"
        )
    print(f"{args.output} ready in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
