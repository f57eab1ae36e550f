"""The shares that ranks build, in worlds that exist in name only: they add up to the model, and copies are copies."""

import dataclasses
import time
from collections import Counter

import pytest
from hydra import compose, initialize_config_module

from msa_pretrain.model.indexer import Indexer
from msa_pretrain.model.parameters import count_parameters
from msa_pretrain.training import sharding
from msa_pretrain.training.config import load_config
from msa_pretrain.training.sharding import (
    ShardingError,
    check_cover,
    check_sharding,
    coordinate_of,
    representatives,
    share_of_rank,
)

TENSOR = [
    "model.num_query_heads=8",
    "model.num_kv_heads=4",
    "moe.num_experts=4",
    "parallel.tensor=2",
    "parallel.sequence=true",
]
# name -> (processes, overrides)
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, TENSOR),
    "tp4": (8, [*TENSOR, "parallel.tensor=4"]),
    "ep2": (4, ["moe.num_experts=4", "parallel.expert=2"]),
    "tp2_ep4": (4, [*TENSOR, "parallel.expert=4"]),
    "tp2_ep2_etp2": (8, [*TENSOR, "parallel.expert=2", "parallel.expert_tensor=2"]),
    "tp2_pp2_ep2": (16, [*TENSOR, "parallel.pipeline=2", "parallel.expert=2", "model.num_layers=4"]),
    "tp2_pp2_vpp2": (4, [*TENSOR, "parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.num_layers=4"]),
    "uneven_pp3": (6, [*TENSOR, "parallel.pipeline=3", "model.num_layers=7"]),
}
VARIANT = [
    "model.qk_norm=full_vector",
    "model.tie_embeddings=true",
    "moe.shared_hidden_size=8",
    "attention.full_layers=[0]",
]


@pytest.fixture
def layout(tiny_config):
    def build(name: str, *overrides: str):
        world_size, layout = LAYOUTS[name]
        config = tiny_config(*layout, *overrides)
        return config.spec, config.training.seq_length, world_size

    return build


@pytest.mark.parametrize("overrides", [[], VARIANT], ids=["plain", "variant"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_shares_make_the_model(layout, name, overrides):
    spec, seq_length, world_size = layout(name, *overrides)
    total = f"hold {count_parameters(spec).total:,} parameters, each exactly once"
    assert total in check_sharding(spec, seq_length, world_size)


@pytest.mark.parametrize("name", ["tp2_pp2_ep2", "tp2_ep2_etp2", "tp4"])
def test_ranks_of_one_coordinate_hold_copies_and_save_nothing_more(layout, name):
    """Why one rank of each coordinate is enough: every rank is built, and adds nothing."""
    spec, seq_length, world_size = layout(name)
    ranks = [share_of_rank(spec, seq_length, rank, world_size) for rank in range(world_size)]
    chosen = representatives(spec.parallel, world_size)
    assert len(chosen) < world_size
    for rank, share in enumerate(ranks):
        same = ranks[chosen[coordinate_of(spec.parallel, rank, world_size)]]
        assert boxes(share) == boxes(same) and share.parameters == same.parameters
    saved = Counter(shard for share in ranks for shard in share.shards if shard.is_main)
    assert saved == Counter(shard for rank in chosen.values() for shard in ranks[rank].shards if shard.is_main)


def boxes(share):
    return [dataclasses.replace(shard, is_main=False) for shard in share.shards]


def test_gaps_and_overlaps_are_found(layout):
    spec, seq_length, world_size = layout("tp2_ep2_etp2")
    chosen = representatives(spec.parallel, world_size).values()
    shards = [s for rank in chosen for s in share_of_rank(spec, seq_length, rank, world_size).shards if s.is_main]
    check_cover(shards)
    (at, expert), *_ = [(at, shard) for at, shard in enumerate(shards) if shard.key.endswith("experts.gate_up_proj")]
    with pytest.raises(ShardingError, match=r"gate_up_proj: the ranks save 2,304 of its 3,072 elements"):
        check_cover(shards[:at] + shards[at + 1 :])
    with pytest.raises(ShardingError, match=r"gate_up_proj: 2 ranks save the part at \(0, 0, 0, 0\)"):
        check_cover([*shards, expert])
    shifted = dataclasses.replace(expert, offset=(1, 0, 0, 0))
    with pytest.raises(ShardingError, match=r"does not lie on the grid"):
        check_cover([*shards[:at], shifted, *shards[at + 1 :]])


def test_a_shard_that_is_taken_for_a_copy_is_found(layout, monkeypatch):
    """Megatron's default takes a plain linear layer for replicated: then only the first rank's heads are saved."""
    monkeypatch.delattr(Indexer, "sharded_state_dict")
    with pytest.raises(ShardingError, match=r"the ranks hold 18,888 different parameters; the model has 19,272"):
        check_sharding(*layout("tp2"))


def test_a_wrong_count_by_arithmetic_is_found(layout, monkeypatch):
    monkeypatch.setattr(sharding, "rank_parameters", lambda spec, held: Counter(experts=1))
    with pytest.raises(ShardingError, match=r"rank 0 .* holds RankParameters\(dense=\d+, experts=\d+\); by arithmetic"):
        check_sharding(*layout("tp2"))


@pytest.mark.layouts
def test_the_mission_adds_up_on_512_gpus():
    """62 layers over 8 stages, 256 experts over 32 ranks, 2 tensor-parallel ranks; in under 90 seconds."""
    overrides = ["experiment=msa_pt_230b", "dry_run=true", "parallel.tensor=2", "parallel.sequence=true"]
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        config = load_config(compose("pretrain", overrides), world_size=512)
    start = time.perf_counter()
    found = check_sharding(config.spec, config.training.seq_length, 512)
    assert found == "256 different ranks of 512 hold 228,909,179,392 parameters, each exactly once"
    assert time.perf_counter() - start < 90  # 29 s on a busy core
