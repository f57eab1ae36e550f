"""Write report.html for a run folder and print the run's summary.

python -m msa_pretrain.scripts.report runs/cpu_smoke
"""

import argparse
from pathlib import Path

from msa_pretrain.training.console import format_summary
from msa_pretrain.training.report import write_report
from msa_pretrain.training.summary import summarize_run


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="report", description="Write report.html for a run and print its summary.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder, the one that holds metrics.jsonl")
    args = parser.parse_args(argv)
    try:
        path = write_report(args.run_dir)
        summary = summarize_run(args.run_dir)
    except ValueError as err:
        parser.error(str(err))
    print(format_summary(summary))
    print(f"\n{path}")


if __name__ == "__main__":
    main()
