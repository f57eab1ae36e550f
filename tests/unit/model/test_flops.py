"""FLOPs against counts of (query, key) pairs, and the paper's ratios (spec section 6)."""

import dataclasses

import pytest
from hydra import compose, initialize_config_module

from msa_pretrain.model.config import Phase
from msa_pretrain.model.flops import (
    attention_forward,
    kept_pairs,
    linear_flops,
    sparse_speedup,
    step_flops,
    visible_pairs,
)
from msa_pretrain.model.parameters import active_matmul_parameters
from msa_pretrain.training.config import load_config


@pytest.fixture(scope="module")
def spec():
    with initialize_config_module("msa_pretrain.configs", version_base="1.3"):
        return load_config(compose("pretrain", ["experiment=msa_pt_230b", "dry_run=true"]), world_size=None).spec


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 11, 12, 13, 30])
@pytest.mark.parametrize("top_k", [1, 3, 20])
def test_pairs_equal_a_loop(length, top_k):
    block = 4
    visible = kept = 0
    for position in range(length):
        visible += position + 1
        local = position // block
        blocks = min(top_k, local + 1)
        kept += (blocks - 1) * block + position % block + 1
    assert visible_pairs(length) == visible
    assert kept_pairs(length, block, top_k) == kept


@pytest.mark.parametrize("heads, groups, ratio", [(64, 4, 28.4), (48, 8, 11.5), (32, 4, 15.1)])
def test_the_papers_ratio_at_a_million_tokens(spec, heads, groups, ratio):
    model = dataclasses.replace(spec.model, num_query_heads=heads, num_kv_heads=groups)
    assert round(sparse_speedup(dataclasses.replace(spec, model=model), 2**20), 1) == ratio


def test_parts_of_one_layer(spec):
    lengths = [5000, 100]
    pairs = visible_pairs(5000) + visible_pairs(100)
    kept = kept_pairs(5000, 128, 16) + visible_pairs(100)
    heads, index = 48 * 128, 8 * 128
    assert attention_forward(spec, lengths, Phase.dense) == (4 * heads * pairs, 0, 0)
    assert attention_forward(spec, lengths, Phase.warmup) == (
        4 * heads * pairs,
        2 * index * pairs,
        2 * (heads + 3 * index) * pairs,
    )
    assert attention_forward(spec, lengths, Phase.sparse) == (
        4 * heads * kept,
        2 * index * pairs,
        2 * (heads + 3 * index) * kept,
    )


def test_a_step_is_six_flops_a_weight_and_the_attention(spec):
    main, index, kl = attention_forward(spec, [4096], Phase.sparse)
    # QKV, output, router and 8 experts of 62 layers, index branches and head
    index_weights = 62 * 3072 * 9 * 128
    weights = 62 * (3072 * 112 * 128 + 256 * 3072 + 8 * 3 * 3072 * 1536) + index_weights + 200064 * 3072
    assert active_matmul_parameters(spec) == weights
    # the detached index branch has no gradient of its input
    assert linear_flops(spec) == 6 * weights - 2 * index_weights
    assert step_flops(spec, [4096], Phase.sparse) == pytest.approx(
        linear_flops(spec) * 4096 + 62 * (3.5 * main + index + kl)
    )
    free = dataclasses.replace(spec, attention=dataclasses.replace(spec.attention, detach=False))
    assert linear_flops(free) == 6 * weights
