"""The router and its bias (field cases, area 2), in the real MoE layer."""

import pytest
import torch

from msa_pretrain.model.config import MoEConfig, Phase
from msa_pretrain.model.gpt import routers
from msa_pretrain.model.router import SigmoidRouter
from msa_pretrain.training.balance import balance_experts
from msa_pretrain.training.optim import clip_and_step

LIMITS = {"backbone": 1.0, "indexer": 1.0}


def router(num_experts=4, top_k=2, **values) -> SigmoidRouter:
    moe = MoEConfig(num_experts=num_experts, top_k=top_k, expert_hidden_size=8, **values)
    config = type("Config", (), {"hidden_size": num_experts})
    one = SigmoidRouter(config, None, moe)
    with torch.no_grad():
        one.weight.copy_(torch.eye(num_experts))  # the hidden state is the logits
    return one


def logits_of(*scores):
    return torch.tensor(scores, dtype=torch.float64).logit().float()[None, None]


def test_one_update_is_the_rate_times_the_sign_of_the_load_error():
    one = router()
    one.update_expert_bias(torch.tensor([10, 2, 4, 8]))
    assert torch.equal(one.expert_bias, torch.tensor([-1e-3, 1e-3, 1e-3, -1e-3]))
    one.update_expert_bias(torch.tensor([6, 6, 6, 6]))  # balanced: sign of zero
    assert torch.equal(one.expert_bias, torch.tensor([-1e-3, 1e-3, 1e-3, -1e-3]))


def test_the_bias_selects_and_the_scores_weigh():
    one = router(routed_scaling=2.0)
    one.expert_bias.copy_(torch.tensor([0.0, 0.0, 2.0, 0.0]))
    probs, chosen = one(logits_of(0.9, 0.8, 0.1, 0.1))
    assert chosen[0].nonzero().flatten().tolist() == [0, 2]
    torch.testing.assert_close(probs[0], 2.0 * torch.tensor([0.9, 0.0, 0.1, 0.0]), rtol=1e-6, atol=1e-7)


def test_counts_are_exact_integers_past_what_bf16_holds():
    one = router(num_experts=3, top_k=1)
    for _ in range(600):
        one(logits_of(0.9, 0.1, 0.1))
    assert one.tokens_per_expert.dtype == torch.int64
    assert one.take_counts().tolist() == [600, 0, 0]
    assert one.tokens_per_expert.tolist() == [0, 0, 0]


def test_padding_is_routed_but_not_counted():
    """Field case 2.3: six tokens and six experts, where a mask along the wrong axis would pass unseen."""
    one = router(num_experts=6, top_k=2)
    hidden = torch.randn(6, 1, 6, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([False, True, False, False, True, False])[:, None]
    probs, chosen = one(hidden, padding)
    assert one.take_counts().tolist() == chosen[~padding[:, 0]].sum(dim=0).tolist()
    assert (probs > 0).sum().item() == 12


def test_evaluation_and_no_grad_passes_count_nothing():
    one = router()
    hidden = torch.randn(5, 1, 4)
    one.eval()
    one(hidden)
    one.train()
    with torch.no_grad():  # the first pass of full recompute
        one(hidden)
    assert one.tokens_per_expert.sum() == 0
    one(hidden)
    assert one.tokens_per_expert.sum() == 10


def test_bias_and_counts_keep_their_types_in_a_bf16_model(rig, tiny_config, batch_of):
    """Field case T2.2: build, wrap, forward, update."""
    one = rig(tiny_config("training.precision=bf16"))
    (_, inside), *_ = routers(one.chunks)
    assert one.model.decoder.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16
    with torch.no_grad():
        inside.expert_bias.fill_(0.5)
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    assert inside.tokens_per_expert.dtype == torch.int64 and inside.tokens_per_expert.sum() == 40
    balance_experts(one.chunks, one.spec, applied=True)
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
    load = balance_experts(one.chunks, one.spec, applied=True)
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
    balance_experts(one.chunks, one.spec, applied=outcome.applied)
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
    balance_experts(one.chunks, one.spec, applied=True)
    assert [layer for layer, _ in routers(one.chunks)] == [1, 3]
    assert all(inside.expert_bias.any() for _, inside in routers(one.chunks))
