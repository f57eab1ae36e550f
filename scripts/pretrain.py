"""Pretrain a model: `python -m msa_pretrain.scripts.pretrain experiment=cpu_smoke`, or the same under torchrun.

`dry_run=true` checks the config, prints what it resolves to and exits; no GPU, no data and no process group needed.
`WORLD_SIZE=512` before it checks the layout for as many GPUs.
"""

import os
import sys
import warnings

import hydra
from omegaconf import DictConfig

from msa_pretrain.training.config import ConfigError, check_overrides, load_config

# Megatron's at every start: model.backend asks for torch's own ops; deprecated names; gradients of inner tensors.
EXPECTED_WARNINGS = (
    "(Transformer Engine and )?Apex (are|is) not installed",
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)


@hydra.main(version_base="1.3", config_path="../configs", config_name="pretrain")
def run(cfg: DictConfig) -> None:
    """Everything after Hydra has composed the config."""
    dry_run = bool(cfg.get("dry_run"))
    world_size = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None if dry_run else 1
    try:
        config = load_config(cfg, world_size=world_size)
    except ConfigError as err:
        sys.exit(str(err))  # Hydra would print a traceback around it
    if dry_run:
        from msa_pretrain.training.dry_run import report

        print(report(config, world_size or config.parallel.smallest_world))
        return
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    from msa_pretrain.training.launch import train  # imports Megatron, which takes seconds

    try:
        train(config, overrides=[argument for argument in sys.argv[1:] if "=" in argument])
    except ConfigError as err:
        sys.exit(str(err))


def main() -> None:
    try:
        check_overrides(sys.argv[1:])
        run()
    except ConfigError as err:
        sys.exit(str(err))


if __name__ == "__main__":
    main()
