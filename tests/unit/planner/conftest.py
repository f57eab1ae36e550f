import copy
from functools import cache

import pytest
from hydra import compose, initialize_config_module

from msa_pretrain.training.config import load_config
from msa_pretrain.training.planner.memory import Load
from msa_pretrain.training.planner.stages import Layout


@cache
def composed(*overrides: str):
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        return load_config(compose("pretrain", list(overrides)), world_size=None)


@pytest.fixture
def config_of():
    """Compose and check: config_of("parallel.pipeline=2", experiment="cpu_smoke")."""

    def build(*overrides: str, experiment: str = "msa_pt_230b"):
        return copy.deepcopy(composed(f"experiment={experiment}", "dry_run=true", *overrides))

    return build


@pytest.fixture
def layout_of():
    """(spec, layout, load) of a config on so many GPUs; `parallel` values the checks refuse may be given."""

    def build(config, world_size: int, **parallel):
        for name, value in parallel.items():
            setattr(config.parallel, name, value)
        layout, training = Layout(config.parallel, world_size), config.training
        micro_batches = training.global_batch_size // (training.micro_batch_size * layout.data_parallel)
        load = Load(training.micro_batch_size, training.seq_length, micro_batches, training.deterministic)
        return config.spec, layout, load

    return build
