import pytest
from hydra import compose, initialize_config_module

from msa_pretrain.training.config import load_config


@pytest.fixture
def config_of():
    """Compose and check: config_of("training.seq_length=64", experiment="cpu_smoke", world_size=1)."""

    def build(*overrides: str, experiment: str = "cpu_smoke", world_size: int | None = 1, dry_run: bool = True):
        with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
            cfg = compose("pretrain", [f"experiment={experiment}", f"dry_run={str(dry_run).lower()}", *overrides])
        return load_config(cfg, world_size=world_size)

    return build
