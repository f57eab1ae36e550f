"""Routing, counts and the bias (field cases, area 2) in the real MoE layer."""

import io
from dataclasses import replace

import pytest
import torch

from msa_pretrain.model.config import Phase
from msa_pretrain.model.gpt import routers
from msa_pretrain.training.balance import balance_experts, spread_out
from msa_pretrain.training.console import ProgressLine
from msa_pretrain.training.optim import clip_and_step

LIMITS = {"backbone": 1.0, "indexer": 1.0}


def balance(one, *, applied=True, num_layers_logged=9):
    return balance_experts(one.chunks, one.spec, applied=applied, valid_rows=40, num_layers_logged=num_layers_logged)


def test_bias_and_counts_keep_their_types_in_a_bf16_model(rig, tiny_config, batch_of):
    """Field case T2.2: build, wrap, forward, update."""
    one = rig(tiny_config("training.precision=bf16"))
    (_, inside), *_ = routers(one.chunks)
    assert one.model.decoder.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16
    with torch.no_grad():
        inside.expert_bias.fill_(0.5)
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    assert inside.tokens_per_expert.dtype == torch.int64 and inside.tokens_per_expert.sum() == 40
    balance(one)
    assert inside.expert_bias.dtype == torch.float32 and inside.weight.dtype == torch.float32
    # bf16 would have rounded 0.501 back to 0.5
    assert {round(value, 6) for value in inside.expert_bias.tolist()} <= {0.499, 0.5, 0.501}
    assert inside.expert_bias.ne(0.5).any()


def test_a_step_moves_the_bias_by_exactly_the_rate_and_conserves_tokens(rig, tiny_config, batch_of):
    one = rig(tiny_config())
    one.backward(batch_of(0, 20), batch_of(1, 13, 7), phase=Phase.sparse)
    (_, inside), *_ = routers(one.chunks)
    counts = inside.tokens_per_expert.clone()
    assert counts.sum() == 2 * 40
    load = balance(one)
    assert torch.equal(inside.expert_bias, 1e-3 * (16 - counts).sign())
    assert load["moe/max_over_mean_load"] == pytest.approx(counts.max().item() / 16)
    assert load["moe/dead_experts"] == (counts == 0).sum()
    assert load["moe/bias_range"] == pytest.approx(2e-3)


def test_a_skipped_step_moves_neither_weights_nor_bias(rig, tiny_config, batch_of):
    """Field case T5.9 on one rank: a NaN gradient, and megatron_facts' bias that moves on a skipped step."""
    one = rig(tiny_config())
    before = one.weights()
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    one.model.output_layer.weight.main_grad[3, 5] = float("nan")
    outcome = clip_and_step(one.optimizer, LIMITS)
    balance(one, applied=outcome.applied)
    (_, inside), *_ = routers(one.chunks)
    assert not outcome.applied
    assert all(torch.equal(weight, before[name]) for name, weight in one.weights().items())
    assert not inside.expert_bias.any() and not inside.tokens_per_expert.any()
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    assert clip_and_step(one.optimizer, LIMITS).applied
    assert any(not torch.equal(weight, before[name]) for name, weight in one.weights().items())


def test_all_tokens_to_one_expert(rig, tiny_config, batch_of):
    """Field case T2.5: two steps without NaN, and zero gradients for the experts without tokens."""
    one = rig(tiny_config("moe.top_k=1"))
    (_, inside), *_ = routers(one.chunks)
    inside.expert_bias.copy_(torch.tensor([9.0, 0, 0, 0, 0]))
    for _ in range(2):
        one.backward(batch_of(0, 20), phase=Phase.sparse)
        gradient = one.gradients()["decoder.layers.1.mlp.experts.gate_up_proj"]
        assert gradient[0].any() and not gradient[1:].any()
        assert clip_and_step(one.optimizer, LIMITS).applied
    assert all(weight.isfinite().all() for weight in one.weights().values())


def test_mixed_stack_updates_every_moe_layer(rig, tiny_config, batch_of):
    one = rig(tiny_config("model.num_layers=4", "moe.dense_mlp_layers=[0,2]"))
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    balance(one)
    assert [layer for layer, _ in routers(one.chunks)] == [1, 3]
    assert all(inside.expert_bias.any() for _, inside in routers(one.chunks))


def test_a_layer_whose_bias_is_frozen_does_not_stop_the_others(rig, tiny_config, batch_of):
    """T2.8: dense, MoE, MoE without a bias update, MoE: the second and fourth move."""
    one = rig(tiny_config("model.num_layers=4"))
    _, (_, frozen), _ = routers(one.chunks)
    frozen.moe = replace(frozen.moe, bias_update_rate=0.0)
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    balance(one)
    assert [bool(inside.expert_bias.any()) for _, inside in routers(one.chunks)] == [True, False, True]


def test_load_metrics_equal_those_of_the_counts(rig, tiny_config, batch_of):
    """Case 2.15, and T2.10: every layer's counts add up to k tokens each."""
    one = rig(tiny_config("model.num_layers=4", "moe.num_experts=9", "moe.top_k=2"))
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    (_, first), (_, second), (_, third) = routers(one.chunks)
    second.tokens_per_expert.copy_(torch.tensor([40, 0, 0, 0, 0, 0, 0, 0, 0]))
    counts = [router.tokens_per_expert.double() for router in (first, second, third)]
    assert [count.sum().item() for count in counts] == [40, 40, 40]
    first.expert_bias[3], third.expert_bias[4] = 0.25, -0.5
    load = balance(one, applied=False, num_layers_logged=2)
    loads = [count * 9 / 40 for count in counts]
    assert load["moe/max_over_mean_load"] == 9.0
    assert load["moe/min_over_mean_load"] == 0.0
    assert load["moe/load_std"] == pytest.approx((8**2 / 9 + 8 / 9) ** 0.5)
    assert load["moe/dead_experts"] == sum((count == 0).sum().item() for count in counts)
    assert load["moe/bias_range"] == 0.5
    # the first and the last layer have keys of their own, five each
    layers = {key for key in load if "/layer_" in key}
    assert {key.rsplit("_", 1)[1] for key in layers} == {"1", "3"} and len(layers) == 10
    assert load["moe/max_over_mean_load/layer_3"] == pytest.approx(loads[2].max().item())
    assert load["moe/load_std/layer_1"] == pytest.approx(loads[0].std(correction=0).item())
    assert load["moe/bias_range/layer_1"] == 0.25


def test_layers_with_keys_of_their_own_are_spread_and_capped():
    layers = list(range(3, 60))
    assert spread_out(layers, 4) == [3, 22, 40, 59]
    assert spread_out(layers, 1) == [3] and spread_out(layers, 0) == []
    assert spread_out(layers, 57) == spread_out(layers, 99) == layers


def test_forced_balance_feeds_every_expert_alike_and_says_so(rig, tiny_config, batch_of):
    one = rig(tiny_config("moe.force_balance=true"))
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    load = balance(one)
    assert load["moe/max_over_mean_load"] == load["moe/min_over_mean_load"] == 1.0
    assert load["moe/forced_balance"] == 1 and load["moe/bias_range"] == 0.0
    line = ProgressLine(10, stream=io.StringIO())
    line.update(1, {"train/lm_loss": 3.0, **load})
    assert "FORCED BALANCE" in line.line(1)
