"""`training.init_optimizer=keep`: a dense run's optimizer goes on in an MSA run, and its index branch begins at step 0.

With torch's Adam, and with one that counts steps as that of Transformer Engine, which Megatron takes where it is there.
"""

import logging

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

from msa_pretrain.model.config import Phase
from msa_pretrain.training.checkpoint import CheckpointError, load_checkpoint
from msa_pretrain.training.config import InitOptimizer
from msa_pretrain.training.init_from import find_source, init_weights, keep_optimizer
from msa_pretrain.training.optim import LearningRates, clip_and_step, clip_group

DENSE = ["attention.kind=dense", "training.warmup_tokens=0"]
FROM_ATTENTION = ["attention.indexer_init=from_attention", "attention.index_dim=8", "training.init_from=somewhere"]
LIMITS = {"backbone": 0.1, "indexer": 0.1}
PAST = 3
"""Steps of the run before."""


class CountingInGroups(torch.optim.Optimizer):
    """AdamW whose step is one of a group with parameters, and not a parameter's: Transformer Engine's FusedAdam."""

    num_built = 0

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode) -> None:
        assert adam_w_mode
        CountingInGroups.num_built += 1
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            assert isinstance(group["step"], int)  # a kernel's argument
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adamw(
                    [parameter],
                    [parameter.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(group["step"] - 1.0)],
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )


@pytest.fixture
def fused_adam(monkeypatch):
    monkeypatch.setattr(megatron_optimizer, "Adam", CountingInGroups)
    monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distrib_optimizer, "Adam", CountingInGroups)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    before = CountingInGroups.num_built
    yield
    assert CountingInGroups.num_built > before


@pytest.fixture(params=["torch_fp32", "torch_bf16", "fused_bf16"])
def precision(request):
    adam, _, precision = request.param.partition("_")
    if adam == "fused":
        request.getfixturevalue("fused_adam")
    return f"training.precision={precision}"


def step(one, *batches, phase, consumed=40):
    LearningRates(one.optimizer, one.config.optim, one.config.training).set(consumed)
    one.backward(*batches, phase=phase)
    outcome = clip_and_step(one.optimizer, LIMITS)
    assert outcome.applied and outcome.norms["backbone"] > LIMITS["backbone"]  # clipped


@pytest.fixture
def dense(rig, tiny_config, batch_of, tmp_path):
    """A dense model with a past, and its checkpoint."""

    def build(*overrides):
        one = rig(tiny_config(*DENSE, *overrides))
        for number in range(PAST):
            step(one, batch_of(number, 20), phase=Phase.dense)
        return one, one.save(tmp_path, step=PAST)

    return build


@pytest.fixture
def started(rig, tiny_config):
    """A new run from a checkpoint, as the trainer starts one."""

    def build(path, *overrides, keep=True):
        one = rig(tiny_config(*overrides))
        source = find_source(path, InitOptimizer.keep if keep else InitOptimizer.reset)
        init_weights(source, one.chunks, one.spec)
        one.optimizer.reload_model_params()  # an optimizer that is built now, as the trainer's, copies them
        if keep:
            keep_optimizer(source, one.chunks, one.optimizer)
        return one

    return build


def optimizer_state(one):
    """Name -> fp32 weight, both moments and step."""
    names = {parameter: name for name, parameter in one.model.named_parameters()}
    found = {}
    for part in one.optimizer.chained_optimizers:
        for parameter, (number, order) in part.model_param_group_index_map.items():
            group = part.optimizer.param_groups[number]
            main = group["params"][order]
            state = part.optimizer.state[main]
            assert state.get("step", group.get("step", 0)) == group.get("step", 0)
            moments = {key: state[key].clone() for key in ("exp_avg", "exp_avg_sq") if key in state}
            found[names[parameter]] = {"param": main.detach().clone(), "step": group.get("step", 0), **moments}
    return found


def largest_difference(ours, theirs):
    """Over all weights and moments of the optimizer; steps must be equal."""
    assert set(ours) == set(theirs)
    worst = 0.0
    for name, values in theirs.items():
        for key, value in values.items():
            if key == "step":
                assert ours[name]["step"] == value, name
            else:
                worst = max(worst, (ours[name][key] - value).abs().max().item())
    return worst


@pytest.mark.parametrize("precision, init", [("bf16", []), ("fp32", FROM_ATTENTION)], ids=["random", "from_attention"])
def test_the_backbone_keeps_its_state_and_the_index_branch_is_new(dense, started, rig, precision, init, caplog):
    precision = f"training.precision={precision}"
    past, path = dense(precision)
    other = ["optim.lr=1e-3", "optim.weight_decay=0.3", "optim.betas=[0.8,0.9]", "optim.indexer_lr=7e-3"]
    with caplog.at_level(logging.INFO):
        one = started(path, precision, *init, *other)
    backbone, index = one.split(optimizer_state(one))
    assert largest_difference(backbone, optimizer_state(past)) == 0.0
    assert {state["step"] for state in backbone.values()} == {PAST}
    weights = one.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in past.weights().items())
    assert index
    for name, state in index.items():
        assert torch.equal(state["param"], weights[name].flatten().float())
        assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    if "bf16" in precision:  # fp32 weights are the checkpoint's and not its bf16 weights widened
        main = backbone["embedding.word_embeddings.weight"]["param"]
        assert main.bfloat16().float().ne(main).any()
    # all else of a group is this run's
    fresh = rig(one.config).optimizer.param_groups
    for ours, theirs in zip(one.optimizer.param_groups, fresh, strict=True):
        kept = {"backbone": PAST, "indexer": 0}[clip_group(ours)]
        assert {**ours, "params": []} == {**theirs, "params": [], "step": kept}
    number = sum(weight.numel() for weight in past.weights().values())
    assert f"optimizer kept: {number:,} parameters from {path} at Adam step 3, index parameters new" in caplog.text


def test_a_warm_up_step_moves_the_backbone_as_the_next_dense_step(
    dense, started, rig, tiny_config, batch_of, precision
):
    """Bit for bit: the dense run resumed, and MSA from its checkpoint, with the same batch and rates."""
    _, path = dense(precision)
    resumed = rig(tiny_config(*DENSE, precision))
    load_checkpoint(path, resumed.chunks, resumed.optimizer, check_data=lambda *_: None)
    kept, reset = started(path, precision), started(path, precision, keep=False)
    step(resumed, batch_of(9, 7, 13), phase=Phase.dense)
    for one in (kept, reset):
        step(one, batch_of(9, 7, 13), phase=Phase.warmup)
    backbone, index = kept.split(optimizer_state(kept))
    again, new_index = reset.split(optimizer_state(reset))
    expected = optimizer_state(resumed)
    assert largest_difference(backbone, expected) == 0.0
    assert all(torch.equal(weight, kept.weights()[name]) for name, weight in resumed.weights().items())
    # a new index branch takes its first Adam step either way
    assert largest_difference(index, new_index) == 0.0 and {state["step"] for state in index.values()} == {1}
    moved = [(again[name]["param"] - state["param"]).abs().max().item() for name, state in expected.items()]
    assert min(moved) > 1e-5


def test_a_continued_run_goes_on_with_both_counts_of_steps(
    precision, dense, started, rig, tiny_config, batch_of, tmp_path, caplog
):
    """Resumed, it is bit for bit the run without a break; a third run from its checkpoint finds nothing new."""
    _, path = dense(precision)
    whole, resumed = started(path, precision), rig(tiny_config(precision))
    for number in (4, 5):
        step(whole, batch_of(number, 20), phase=Phase.warmup)
    checkpoint = whole.save(tmp_path / "continued", step=2)
    load_checkpoint(checkpoint, resumed.chunks, resumed.optimizer, check_data=lambda *_: None)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        third = started(checkpoint, precision)
    assert "at Adam step 5" in caplog.text and "index parameters new" not in caplog.text
    for one in (whole, resumed, third):
        step(one, batch_of(6, 20), phase=Phase.sparse)
    states = optimizer_state(whole)
    assert (
        largest_difference(optimizer_state(resumed), states)
        == largest_difference(optimizer_state(third), states)
        == 0.0
    )
    backbone, index = whole.split(states)
    assert {state["step"] for state in backbone.values()} == {PAST + 3}
    assert {state["step"] for state in index.values()} == {3}


def test_weights_of_a_wider_model_are_the_fp32_ones(dense, started):
    past, path = dense("training.precision=bf16")
    one = started(path, "training.precision=fp32")
    for name, state in optimizer_state(past).items():
        assert torch.equal(one.weights()[name].flatten(), state["param"]), name


FINAL = "model.decoder.final_layernorm.weight"


def without_optimizer(content):
    del content["optimizer"]


def without_a_moment(content):
    for tensors in content["optimizer"][0]["param_state"].values():
        if tensors["exp_avg"].key.endswith(FINAL):
            del tensors["exp_avg"]


def under_another_name(content):
    for tensors in content["optimizer"][0]["param_state"].values():
        if tensors["param"].key.endswith(FINAL):
            tensors["param"].key = "optimizer.state.param.model.old.weight"


REFUSED = {
    without_optimizer: r"step_3 has no optimizer for training\.init_optimizer=keep.*Use training\.init_optimizer=reset",
    without_a_moment: rf"optimizer in .*step_3 does not fit.* lacks optimizer\.state\.exp_avg\.{FINAL}; it has no",
    under_another_name: rf"lacks optimizer\.state\.param\.{FINAL}; it has optimizer\.state\.param\.model\.old\.w",
}


@pytest.mark.parametrize("change, message", REFUSED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_an_optimizer_that_does_not_fit_is_refused_by_name(rig, tiny_config, started, tmp_path, change, message):
    one = rig(tiny_config(*DENSE))
    with pytest.MonkeyPatch.context() as patch:
        save = dist_checkpointing.save
        patch.setattr(dist_checkpointing, "save", lambda content, *args: save((change(content), content)[1], *args))
        path = one.save(tmp_path, step=3)
    with pytest.raises(CheckpointError, match=message):
        started(path)
