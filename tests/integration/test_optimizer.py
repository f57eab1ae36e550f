"""Groups, rates and the repaired distributed optimizer."""

import math

import pytest
import torch
from megatron.core.optimizer import clip_grads

from msa_pretrain.model.config import Phase
from msa_pretrain.training.optim import LearningRates, TorchAdamDistributedOptimizer, clip_and_step, clip_group

LIMITS = {"backbone": 1.0, "indexer": 1.0}


def test_every_parameter_is_in_the_right_group(rig, tiny_config):
    one = rig(tiny_config("optim.weight_decay=0.2", "optim.indexer_weight_decay=0.05", "training.precision=bf16"))
    LearningRates(one.optimizer, one.config.optim, one.config.training).set(400)
    groups = [group for group in one.optimizer.param_groups if group["params"]]
    decay = {(clip_group(group), group["wd_mult"]): group["weight_decay"] for group in groups}
    assert decay == {
        ("backbone", 1.0): 0.2,
        ("backbone", 0.0): 0.0,
        ("indexer", 1.0): 0.05,
        ("indexer", 0.0): 0.0,
    }
    sizes = {"backbone": 0, "indexer": 0}
    for group in groups:
        sizes[clip_group(group)] += sum(parameter.numel() for parameter in group["params"])
    backbone, index = one.split(one.weights())
    assert sizes == {
        "backbone": sum(weight.numel() for weight in backbone.values()),
        "indexer": sum(weight.numel() for weight in index.values()),
    }


def test_group_identifiers_are_distinct_so_that_loading_cannot_merge_them(rig, tiny_config):
    """Megatron matches the groups of a checkpoint by these keys alone; a clash gave the backbone the index rate."""
    one = rig(tiny_config("training.precision=bf16"))
    for part in one.optimizer.chained_optimizers:
        keys = [
            tuple(group.get(key) for key in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))
            for group in part.param_groups
        ]
        assert len(set(keys)) == len(keys), keys


@pytest.mark.parametrize(
    "overrides, consumed, backbone",
    [
        ([], 40, 2e-3 * 40 / 100),  # linear warm-up over 100 tokens
        ([], 100, 2e-3),
        ([], 250, 2e-4 + 1.8e-3 * 0.5 * (1 + math.cos(math.pi * 150 / 300))),
        ([], 400, 2e-4),
        (["optim.schedule=wsd", "optim.wsd_decay_tokens=100"], 290, 2e-3),
        (["optim.schedule=wsd", "optim.wsd_decay_tokens=100"], 350, 2e-4 + 1.8e-3 * 0.5),
    ],
)
def test_rates_are_functions_of_consumed_tokens(rig, tiny_config, overrides, consumed, backbone):
    one = rig(tiny_config("optim.lr_warmup_tokens=100", *overrides))
    rates = LearningRates(one.optimizer, one.config.optim, one.config.training)
    for visited in (400, consumed):  # in any order: no state
        values = rates.set(visited)
    assert values["backbone"] == pytest.approx(backbone, rel=1e-12)
    assert values["indexer"] == pytest.approx(backbone * 5e-3 / 2e-3, rel=1e-12)


def test_first_step_is_adamw(rig, tiny_config, batch_of):
    """One step against AdamW by hand: the first update is lr x sign(g) (up to eps) after decay."""
    one = rig(tiny_config("optim.eps=1e-12"))
    rates = LearningRates(one.optimizer, one.config.optim, one.config.training).set(40)
    before = one.weights()
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    gradients = one.gradients()
    clip_and_step(one.optimizer, {"backbone": 1e9, "indexer": 1e9})
    for name, weight in one.weights().items():
        group = "indexer" if ".indexer." in name else "backbone"
        decay = 0.0 if weight.ndim == 1 or group == "indexer" else 0.1
        expected = before[name] * (1 - rates[group] * decay) - rates[group] * gradients[name].sign()
        clear = gradients[name].abs() > 1e-7
        torch.testing.assert_close(weight[clear], expected[clear], rtol=1e-4, atol=1e-7)


def test_state_can_be_read_before_the_first_step_and_loads_into_a_fresh_optimizer(rig, tiny_config, batch_of):
    """megatron_facts: state_dict() asserted before a step, and a load shared one step tensor among all parameters."""
    one, two = rig(tiny_config()), rig(tiny_config())
    parts = [part for part in one.optimizer.chained_optimizers if not part.is_stub_optimizer]
    assert all(isinstance(part, TorchAdamDistributedOptimizer) for part in parts)
    one.optimizer.state_dict()  # raised AssertionError without the repair
    for _ in range(3):
        one.backward(batch_of(0, 20), phase=Phase.sparse)
        clip_and_step(one.optimizer, LIMITS)
    two.optimizer.load_state_dict(one.optimizer.state_dict())
    for _ in range(2):
        two.backward(batch_of(0, 20), phase=Phase.sparse)
        clip_and_step(two.optimizer, LIMITS)
    steps = [
        state["step"].item() for part in two.optimizer.chained_optimizers for state in part.optimizer.state.values()
    ]
    assert len(steps) > 10 and set(steps) == {5.0}  # a shared tensor would have counted every parameter


def test_a_part_without_gradients_of_a_group_is_not_clipped(rig, tiny_config, batch_of, monkeypatch):
    """Transformer Engine's multi_tensor_scale, which Megatron takes where it is installed, ends the process on []."""
    sizes = []

    def apply(op, overflow, lists, *arguments):
        assert all(lists), "a segmentation fault in Transformer Engine 2.11"
        sizes.append(len(lists[0]))
        return original(op, overflow, lists, *arguments)

    original = clip_grads.multi_tensor_applier
    one = rig(tiny_config())
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    monkeypatch.setattr(clip_grads, "multi_tensor_applier", apply)
    limits = {"backbone": 1e-3, "indexer": 1e-3}
    outcome = clip_and_step(one.optimizer, limits)
    assert outcome.applied and all(norm > 1e-3 for norm in outcome.norms.values())
    # norms and clips of the dense backbone, the experts and the index branch
    assert len(sizes) == 6
