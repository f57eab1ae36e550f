"""From a checked config to a finished run: process groups, run folder, trainer, summary, report."""

import logging
import os
import sys
import time

import torch.distributed as dist

from ..data.loader import DataExhaustedError
from ..model.megatron_compat import warn_untested_versions
from ..model.parallel import distributed, model_parallel
from .config import ConfigError, TrainConfig
from .console import format_summary
from .datasets import describe_uses
from .machine import machine_problems
from .report import write_report
from .run_folder import RunFolder
from .summary import summarize_run
from .trainer import Trainer

logger = logging.getLogger(__name__)


def train(config: TrainConfig, overrides: list[str]) -> None:
    """Run `config` on this rank; rank 0 prints what it takes of each source, and at the end summary and report's path.

    Exits with status 1 on every rank, and rank 0 with a message, when the data end before the token budget.
    """
    if problems := list(machine_problems(config)):
        raise ConfigError(problems)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once; torch insists on it
    if config.parallel.tensor > 1:
        # Megatron counts on it to start a collective before the product that hides it; CUDA reads it once
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    start = time.perf_counter()
    with distributed(), model_parallel(config.parallel, config.training.seed):
        folder = RunFolder(config)
        folder.prepare(config, overrides)
        with folder.capture_logs():
            warn_untested_versions()
            trainer = Trainer(config, folder)
            if dist.get_rank() == 0:
                print("\n".join(describe_uses(trainer.data.train)), flush=True)
            try:
                trainer.run()
            except DataExhaustedError as err:  # a run that ends early has failed
                if dist.get_rank() == 0:
                    print(err, file=sys.stderr, flush=True)
                dist.barrier()  # torchrun ends the others as soon as one has gone
                sys.exit(1)
            logger.info("finished in %.1f s", time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(format_summary(summarize_run(folder.path)))
            print(f"\nreport: {write_report(folder.path)}")
