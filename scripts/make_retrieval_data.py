"""Synthetic retrieval documents as JSON lines, for the long-context stage of training or for its evaluation.

    python -m msa_pretrain.scripts.make_retrieval_data --split train --tokens 32768 131072 --number 1000 \\
        --tokenizer my_tokenizer --output retrieval.jsonl
    python -m msa_pretrain.scripts.prepare_data --input retrieval.jsonl --tokenizer my_tokenizer \\
        --output /data/retrieval

`text` is the whole document; `prompt` and `answer` are its parts. The two splits share no key, no seed and no haystack.
"""

import argparse
import json
import sys
from pathlib import Path

from msa_pretrain.data.corpus import read_corpus
from msa_pretrain.data.synthetic import SPLITS, TASKS, generate
from msa_pretrain.data.tokenizer import load_tokenizer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=SPLITS, required=True)
    parser.add_argument("--task", nargs="+", choices=[*TASKS], default=[*TASKS], help="default: all")
    parser.add_argument("--tokens", nargs="+", type=int, required=True, help="upper limits of the document lengths")
    parser.add_argument("--number", type=int, required=True, help="documents of each task and length")
    parser.add_argument("--first", type=int, default=0, help="number of the first document (default: %(default)s)")
    parser.add_argument("--tokenizer", required=True, help="as for prepare_data")
    parser.add_argument("--eod-token", help="as for prepare_data")
    parser.add_argument("--haystack", type=Path, help="running text to hide in (default: the built-in corpus)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        tokenizer = load_tokenizer(args.tokenizer, args.eod_token)
        haystack = _haystack(args.haystack, args.split)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("w") as file:
            for tokens in args.tokens:
                for task in args.task:
                    for number in range(args.first, args.first + args.number):
                        made = generate(
                            task,
                            split=args.split,
                            num_tokens=tokens - 1,  # the end of the document is one more
                            count_tokens=lambda text: int(tokenizer.encode_batch([text])[1].sum()),
                            haystack=haystack,
                            number=number,
                        )
                        record = {"text": made.text, "task": task, "prompt": made.prompt, "answer": made.answer}
                        file.write(json.dumps(record) + "\n")
    except (ValueError, OSError) as err:
        sys.exit(f"make_retrieval_data: {err}")
    print(f"{args.output}: {len(args.tokens) * len(args.task) * args.number} documents, split {args.split}")


def _haystack(path: Path | None, split: str) -> str:
    if path is not None:
        return path.read_text()
    files = read_corpus("train" if split == "train" else "valid", max_bytes=2_000_000)
    return "\n".join(content.decode("utf-8", errors="replace") for _, content in files)


if __name__ == "__main__":
    main()
