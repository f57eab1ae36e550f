"""The files of a run (`runs/<name>/`): made by rank 0 alone, from what the config resolved to."""

import contextlib
import importlib.metadata
import itertools
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from .config import TrainConfig, to_dict, to_yaml
from .redaction import redact

PACKAGES = (
    "msa-pretrain",
    "torch",
    "megatron-core",
    "triton",
    "transformer-engine",
    "hydra-core",
    "omegaconf",
    "wandb",
)


class RunFolder:
    """Paths inside `runs/<name>/`."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = Path(config.run.dir) / config.run.name
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.config_yaml = to_yaml(redact(to_dict(config)))

    def prepare(self, config: TrainConfig, overrides: list[str]) -> None:
        """Make the folder and write config, overrides and versions; every rank returns when they are there."""
        if dist.get_rank() == 0:
            if config.training.resume == "none" and self.metrics.exists():
                raise FileExistsError(
                    f"{self.path} holds a run already. Choose another run.name, or training.resume=auto to continue it."
                )
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            (self.path / "config.yaml").write_text(self.config_yaml)
            (self.path / "overrides.txt").write_text("".join(f"{_redacted(item)}\n" for item in overrides))
            (self.path / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")
        dist.barrier()

    @contextlib.contextmanager
    def capture_logs(self) -> Iterator[None]:
        """Inside, this rank's log records and warnings go to logs/rank_<r>.log; rank 0's warnings to stderr too."""
        handlers: list[logging.Handler] = [logging.FileHandler(self.path / "logs" / f"rank_{dist.get_rank()}.log")]
        handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        if dist.get_rank() == 0:
            handlers.append(logging.StreamHandler())
            handlers[1].setLevel(logging.WARNING)
        loggers = [logging.getLogger("msa_pretrain"), logging.getLogger("py.warnings")]
        loggers[0].setLevel(logging.INFO)
        logging.captureWarnings(True)
        for logger, handler in itertools.product(loggers, handlers):
            logger.addHandler(handler)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            for logger, handler in itertools.product(loggers, handlers):
                logger.removeHandler(handler)
            handlers[0].close()


def _redacted(override: str) -> str:
    key, equals, value = override.partition("=")
    return f"{key}{equals}{redact({key: value})[key]}"


def versions() -> dict[str, str]:
    """Versions of Python, the packages a result depends on, and the project's commit; 'absent' where there is none."""
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    found["commit"] = commit.stdout.strip() if commit.returncode == 0 else "absent"
    return found
