"""What a run needs and which layouts fit.

    python -m msa_pretrain.scripts.plan experiment=msa_pt_230b gpus=512 gpu=h200

Every layout, micro-batch size and recompute that the run's own checks accept is tried; what is set of these on the
command line stays as it is set. Prints tables, writes JSON, exits 1 when nothing fits. No GPU needed.
"""

import json
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from msa_pretrain.training.config import ConfigError, check_overrides, load_config
from msa_pretrain.training.planner.hardware import GPUS, GPUS_PER_NODE
from msa_pretrain.training.planner.plan_report import as_json, text
from msa_pretrain.training.planner.search import search

OWN_KEYS = ("gpus", "gpu", "best", "output")


def own_words(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(words for this command, words for the run) of a command line."""
    own = [word for word in arguments if word.split("=")[0].lstrip("+") in OWN_KEYS]
    return own, [word for word in arguments if word not in own]


def check_machine(cfg: DictConfig) -> tuple[int, str, int]:
    """(GPUs, kind, layouts to print) of the command line; raises ConfigError."""
    problems = []
    if OmegaConf.is_missing(cfg, "gpus"):
        raise ConfigError(["gpus is missing. Set gpus=..."])
    numbers = {}
    for key in ("gpus", "best"):
        if not isinstance(cfg[key], int) or cfg[key] < 1:
            problems.append(f"{key} ({cfg[key]}) must be a whole number above 0.")
        else:
            numbers[key] = cfg[key]
    gpus = numbers.get("gpus", 1)
    if gpus > GPUS_PER_NODE and gpus % GPUS_PER_NODE:
        problems.append(f"gpus ({gpus}) must be whole nodes of {GPUS_PER_NODE}. Use {-(-gpus // 8) * 8}.")
    if cfg.gpu not in GPUS:
        problems.append(f"gpu ({cfg.gpu}) is not known. Use {', '.join(GPUS)}.")
    if problems:
        raise ConfigError(problems)
    return gpus, cfg.gpu, cfg.best


@hydra.main(version_base="1.3", config_path="../configs", config_name="plan")
def run(cfg: DictConfig) -> None:
    """Everything after Hydra has composed the config."""
    try:
        gpus, kind, best = check_machine(cfg)
        rest = OmegaConf.masked_copy(cfg, [key for key in cfg if key not in OWN_KEYS])
        config = load_config(rest, world_size=None)
    except (ConfigError, OmegaConfBaseException) as err:
        sys.exit(str(err))
    if config.training.length_schedule:
        sys.exit(
            "training.length_schedule: stages of different lengths have plans of their own. Set it to [] and give "
            "training.seq_length and training.global_batch_size of one stage."
        )
    _, words = own_words([word for word in sys.argv[1:] if "=" in word])
    pinned = {word.split("=")[0].lstrip("+") for word in words}
    if "parallel" in pinned:  # a layout of configs/parallel, chosen as a whole
        pinned |= {f"parallel.{key}" for key in cfg.parallel}
    found = search(config, gpus, GPUS[kind], pinned)
    print(text(config, gpus, GPUS[kind], found, best, words))
    path = Path(cfg.output or f"{config.run.dir}/plans/{config.run.name}_{gpus}x{kind}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(config, gpus, GPUS[kind], found, best, words), indent=1) + "\n")
    print(f"\n{path}")
    if not found.fitting:
        sys.exit(1)


def main() -> None:
    try:
        check_overrides(own_words(sys.argv[1:])[1])
        run()
    except ConfigError as err:
        sys.exit(str(err))


if __name__ == "__main__":
    main()
