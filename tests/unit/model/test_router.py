"""The router by itself (field cases, area 2): selection, weights, groups, counts, forced balance."""

import math

import pytest
import torch

from msa_pretrain.model.config import MoEConfig, ScoreFunction
from msa_pretrain.model.router import SigmoidRouter


def router(num_experts=4, top_k=2, **values) -> SigmoidRouter:
    moe = MoEConfig(num_experts=num_experts, top_k=top_k, expert_hidden_size=8, **values)
    config = type("Config", (), {"hidden_size": num_experts})
    one = SigmoidRouter(config, None, moe)
    with torch.no_grad():
        one.weight.copy_(torch.eye(num_experts))  # the hidden state is the logits
    return one


def logits_of(*scores):
    return torch.tensor(scores, dtype=torch.float64).logit().float()[None, None]


def random_logits(tokens, experts, seed=0):
    return torch.randn(tokens, 1, experts, generator=torch.Generator().manual_seed(seed))


def test_one_update_is_the_rate_times_the_sign_of_the_load_error():
    """T2.1."""
    one = router()
    one.update_expert_bias(torch.tensor([10, 2, 4, 8]))
    assert torch.equal(one.expert_bias, torch.tensor([-1e-3, 1e-3, 1e-3, -1e-3]))
    one.update_expert_bias(torch.tensor([6, 6, 6, 6]))  # balanced: sign of zero
    assert torch.equal(one.expert_bias, torch.tensor([-1e-3, 1e-3, 1e-3, -1e-3]))


def test_the_sign_is_taken_of_integers():
    """Case 2.2: one token apart at counts that fp32 cannot tell from each other."""
    one = router(num_experts=2, top_k=1)
    one.update_expert_bias(torch.tensor([2**40, 2**40 + 1]))
    assert torch.equal(one.expert_bias, torch.tensor([1e-3, -1e-3]))


def test_the_bias_selects_and_the_scores_weigh():
    """T2.3."""
    one = router(routed_scaling=2.0)
    one.expert_bias.copy_(torch.tensor([0.0, 0.0, 2.0, 0.0]))
    probs, chosen = one(logits_of(0.9, 0.8, 0.1, 0.1))
    assert chosen[0].nonzero().flatten().tolist() == [0, 2]
    torch.testing.assert_close(probs[0], 2.0 * torch.tensor([0.9, 0.0, 0.1, 0.0]), rtol=1e-6, atol=1e-7)


def test_a_losing_group_stays_out_when_all_biased_scores_are_negative():
    """T2.4: the groups are worth -3.906 and -3.000; a mask of zeros would let the first, losing group win."""
    one = router(num_experts=8, num_groups=2, top_groups=1)
    one.expert_bias.copy_(torch.tensor([-2.0] * 4 + [-1.5] * 4))
    probs, chosen = one(torch.tensor([-3.0] * 4 + [-9.0] * 4)[None, None])
    ids = chosen[0].nonzero().flatten().tolist()
    assert len(ids) == 2 and min(ids) >= 4
    torch.testing.assert_close(probs[0][ids], torch.tensor([0.5, 0.5]))  # weights are of unbiased scores


@pytest.mark.parametrize("num_groups, top_groups, top_k", [(4, 2, 4), (4, 2, 2), (3, 1, 2), (6, 3, 3), (1, 1, 3)])
def test_group_limits_equal_a_loop(num_groups, top_groups, top_k):
    one = router(num_experts=12, top_k=top_k, num_groups=num_groups, top_groups=top_groups)
    one.expert_bias.copy_(random_logits(1, 12, seed=9).flatten() - 1)
    logits = random_logits(50, 12)
    _, chosen = one(logits)
    size, best = 12 // num_groups, top_k // top_groups
    for row, ids in zip(logits.flatten(0, 1).sigmoid() + one.expert_bias, chosen, strict=True):
        groups = [row[start : start + size].tolist() for start in range(0, 12, size)]
        worth = [sum(sorted(group, reverse=True)[:best]) for group in groups]
        kept = sorted(range(num_groups), key=lambda group: -worth[group])[:top_groups]
        allowed = [expert for expert in range(12) if expert // size in kept]
        assert set(ids.nonzero().flatten().tolist()) == set(sorted(allowed, key=lambda e: -row[e])[:top_k])


def test_counts_are_exact_integers_past_what_bf16_holds():
    """Case 2.2."""
    one = router(num_experts=3, top_k=1)
    for _ in range(600):
        one(logits_of(0.9, 0.1, 0.1))
    assert one.tokens_per_expert.dtype == torch.int64
    assert one.take_counts().tolist() == [600, 0, 0]
    assert one.tokens_per_expert.tolist() == [0, 0, 0]


def test_padding_is_routed_but_not_counted():
    """Case 2.3: six tokens and six experts, where a mask along the wrong axis would pass unseen."""
    one = router(num_experts=6, top_k=2)
    documents = torch.tensor([0, -1, 1, 1, -1, 1])[:, None]
    probs, chosen = one(random_logits(6, 6), documents)
    assert one.take_counts().tolist() == chosen[documents[:, 0] >= 0].sum(dim=0).tolist()
    assert (probs > 0).sum().item() == 12


def test_evaluation_and_no_grad_passes_count_nothing():
    """T2.7 and T2.6: validation, and the first pass of full recompute."""
    one = router(aux_loss_coef=1.0, z_loss_coef=1.0)
    hidden = random_logits(5, 4)
    one.eval()
    for _ in range(3):
        one(hidden)
    one.train()
    with torch.no_grad():
        one(hidden)
    assert one.tokens_per_expert.sum() == 0 and not one.loss_sums.any() and not one.expert_bias.any()
    one(hidden)
    assert one.tokens_per_expert.sum() == 10 and one.loss_sums.all()


def test_forced_balance_takes_experts_in_turn_and_moves_no_bias():
    one = router(num_experts=6, top_k=2, force_balance=True)
    one.expert_bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0]))  # no learned state has a say
    hidden = random_logits(9, 6).requires_grad_()
    probs, chosen = one(hidden)
    assert [row.nonzero().flatten().tolist() for row in chosen[:4]] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert one.take_counts().tolist() == [3] * 6
    scores = hidden.detach()[1, 0, 2:4].sigmoid()
    torch.testing.assert_close(probs[1, 2:4], scores / scores.sum())
    probs[:, 0].sum().backward()
    assert hidden.grad.any()  # the router's backward still costs what it costs
    before = one.expert_bias.clone()
    one.update_expert_bias(torch.tensor([5, 0, 0, 0, 0, 0]))
    assert torch.equal(one.expert_bias, before)


def test_softmax_scores_are_renormalised_over_the_chosen():
    """Qwen3-MoE: softmax over all experts, the k largest, divided by their sum."""
    one = router(score_function=ScoreFunction.softmax, bias_update_rate=0.0)
    probs, chosen = one(torch.tensor([0.1, 2.0, -1.0, 1.0])[None, None])
    assert chosen[0].tolist() == [False, True, False, True]
    larger = 1 / (1 + math.exp(-1))
    assert probs[0].tolist() == pytest.approx([0, larger, 0, 1 - larger], rel=1e-6)
