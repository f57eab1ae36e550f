"""Pretrain a model: `python -m msa_pretrain.scripts.pretrain experiment=cpu_smoke`, or the same under torchrun.

`dry_run=true` checks the config, prints what it resolves to and exits; no GPU, no data and no process group needed.
`WORLD_SIZE=512` before it checks the layout for as many GPUs, and builds every rank's share of the model without memory
to see that the shares add up (half a minute for the 62-layer model); `WORLD_SIZE=smallest` for the fewest GPUs.
"""

import os
import sys
import warnings

import hydra
from omegaconf import DictConfig

from msa_pretrain.training.config import ConfigError, check_overrides, load_config

# Megatron's at every start: model.backend says where layers come from; deprecated names; gradients of inner tensors.
EXPECTED_WARNINGS = (
    "full scope is deprecated",
    "(Transformer Engine and )?Apex (are|is) not installed",
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)


@hydra.main(version_base="1.3", config_path="../configs", config_name="pretrain")
def run(cfg: DictConfig) -> None:
    """Everything after Hydra has composed the config."""
    try:
        if cfg.get("dry_run"):
            rehearse(cfg, os.environ.get("WORLD_SIZE"))
            return
        config = load_config(cfg, world_size=int(os.environ.get("WORLD_SIZE", 1)))
    except ConfigError as err:
        sys.exit(str(err))  # Hydra would print a traceback around it
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    from msa_pretrain.training.launch import train  # imports Megatron, which takes seconds

    try:
        train(config, overrides=[argument for argument in sys.argv[1:] if "=" in argument])
    except ConfigError as err:
        sys.exit(str(err))


def rehearse(cfg: DictConfig, world_size: str | None) -> None:
    """The dry run: what the config resolves to and, for a given number of GPUs, whether the ranks' shares add up."""
    from msa_pretrain.training.dry_run import report
    from msa_pretrain.training.machine import machine_problems

    fixed = int(world_size) if world_size not in (None, "smallest") else None
    config = load_config(cfg, world_size=fixed)
    planned = fixed or config.parallel.smallest_world
    if world_size == "smallest":
        config = load_config(cfg, world_size=planned)
    print(report(config, planned), flush=True)
    for problem in machine_problems(config):
        print(f"refused on this machine: {problem}", flush=True)
    if world_size is not None:
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        from msa_pretrain.training.sharding import check_sharding  # imports Megatron, which takes seconds

        print(f"sharding: {check_sharding(config.spec, config.training.seq_length, planned)}")


def main() -> None:
    try:
        check_overrides(sys.argv[1:])
        run()
    except ConfigError as err:
        sys.exit(str(err))


if __name__ == "__main__":
    main()
