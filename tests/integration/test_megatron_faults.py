"""Faults of megatron-core 0.16.1, shown without our remedies. A test that fails here names a remedy that can go."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from msa_pretrain.model import gpt
from msa_pretrain.model.config import Phase
from msa_pretrain.model.gpt import build_model, build_on_meta
from msa_pretrain.model.parallel import fake_rank
from msa_pretrain.training import optim
from msa_pretrain.training.checkpoint import OPTIMIZER_METADATA, model_state
from msa_pretrain.training.optim import clip_and_step
from msa_pretrain.training.step import StepPlan, run_micro_batches

pytestmark = pytest.mark.megatron_fault
LIMITS = {"backbone": 1.0, "indexer": 1.0}


@pytest.fixture
def without_repair(monkeypatch):
    """The distributed optimizer as Megatron ships it."""
    monkeypatch.setattr(optim, "TorchAdamDistributedOptimizer", DistributedOptimizer)


def test_state_cannot_be_read_before_the_first_step(rig, tiny_config, without_repair):
    """Remedy: TorchAdamDistributedOptimizer._ensure_state."""
    with pytest.raises(AssertionError):
        rig(tiny_config()).optimizer.state_dict()


def test_a_load_shares_one_step_tensor_among_all_parameters(rig, tiny_config, batch_of, monkeypatch):
    """Remedy: a tensor for each in TorchAdamDistributedOptimizer.load_state_dict."""

    def load_as_shipped(self, state_dict):
        self._ensure_state()
        DistributedOptimizer.load_state_dict(self, state_dict)

    monkeypatch.setattr(optim.TorchAdamDistributedOptimizer, "load_state_dict", load_as_shipped)
    one, two = rig(tiny_config()), rig(tiny_config())
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    clip_and_step(one.optimizer, LIMITS)
    two.optimizer.load_state_dict(one.optimizer.state_dict())
    two.backward(batch_of(0, 20), phase=Phase.sparse)
    clip_and_step(two.optimizer, LIMITS)
    steps = {s["step"].item() for part in two.optimizer.chained_optimizers for s in part.optimizer.state.values()}
    assert max(steps) > 2.0


def test_an_optimizer_without_parameters_cannot_be_read(rig, tiny_config, batch_of):
    """As that of the experts on a pipeline stage without MoE layers. Remedy: GroupStepsDistributedOptimizer."""
    one = rig(tiny_config())
    one.backward(batch_of(0, 20), phase=Phase.sparse)
    clip_and_step(one.optimizer, LIMITS)
    experts = one.optimizer.chained_optimizers[-1]
    whole = experts.state_dict()["optimizer"]["param_groups"]
    experts.optimizer.state.clear()
    for group in experts.optimizer.param_groups:
        group["params"] = []
    with pytest.raises(AssertionError):
        DistributedOptimizer.state_dict(experts)
    assert experts.state_dict()["optimizer"]["param_groups"] == whole and whole[0]["step"] == 1.0


def test_groups_at_different_steps_cannot_be_read(rig, tiny_config):
    """As when a new index branch joins a trained backbone. Remedy: GroupStepsDistributedOptimizer and its chain."""
    one = rig(tiny_config())
    dense = one.optimizer.chained_optimizers[0]
    state = dense.state_dict()
    for group in state["optimizer"]["param_groups"]:
        group["step"] = {"backbone": 7, "indexer": 2}[optim.clip_group(group)]
    with pytest.raises(AssertionError):
        DistributedOptimizer.load_state_dict(dense, state)
    dense.load_state_dict(state)
    with pytest.raises(AssertionError):
        DistributedOptimizer.state_dict(dense)
    with pytest.raises(AssertionError, match="steps"):
        ChainedOptimizer._synchronize_steps(one.optimizer)
    assert dense.state_dict() == state
    one.optimizer.sharded_state_dict(model_state(one.chunks), metadata=OPTIMIZER_METADATA)


def test_padding_between_buckets_shifts_the_saved_state(rig, tiny_config):
    """The last parameter ends behind the state that is collected. Remedy: _count_padding_between_buckets."""
    config = tiny_config("model.tie_embeddings=true")
    rig(config)  # a world
    model = build_model(config.spec, 20)[0]
    model.embedding.word_embeddings.weight.shared_embedding = True  # as Megatron marks one that two stages share
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    shipped = DistributedDataParallel(model.config, settings, model).buffers[0]
    ours = optim.wrap_with_ddp([model])[0].buffers[0]
    ends = {max(end for _, end, _ in buffer.param_index_map.values()) for buffer in (shipped, ours)}
    assert len(shipped.buckets) == 2
    assert ends == {ours.numel_unpadded} and shipped.numel_unpadded < ours.numel_unpadded


def test_one_gather_of_bf16_and_fp32_weights_mixes_them_up(rig, tiny_config):
    """On gloo, in all model chunks but the first as Megatron's trainer wraps them. Remedy: wrap_with_ddp."""

    def changed(chunk):
        before = {name: weight.detach().clone() for name, weight in chunk.named_parameters()}
        chunk.start_param_sync()  # as behind every step; alone in its world, a rank gathers what it has
        return [name for name, weight in chunk.named_parameters() if not torch.equal(weight, before[name])]

    config = tiny_config("training.precision=bf16")
    rig(config)  # a world
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    first, second, shipped = (build_model(config.spec, 20)[0] for _ in range(3))
    assert changed(DistributedDataParallel(shipped.config, settings, shipped, disable_bucketing=True))
    assert not any(map(changed, optim.wrap_with_ddp([first, second])))


def test_groups_without_an_identifier_of_their_own_are_merged_by_a_load(rig, tiny_config, monkeypatch):
    """Remedy: INDEXER_TAG. Without it the backbone's groups come back with the index branch's rate."""
    monkeypatch.setattr(optim, "INDEXER_TAG", 1.0)
    one = rig(tiny_config("optim.weight_decay=0.0"))
    one.optimizer.load_state_dict(one.optimizer.state_dict())
    rates = {group.get("clip_group", "backbone"): group.get("max_lr") for group in one.optimizer.param_groups}
    merged = [group for group in one.optimizer.param_groups if group["params"] and "max_lr" in group]
    backbone = one.split(one.weights())[0]
    assert sum(p.numel() for group in merged for p in group["params"]) > sum(
        weight.numel() for name, weight in one.weights().items() if name not in backbone
    ), rates


def test_fp32_and_bf16_parameters_in_one_group_mix_up_the_index_map(rig, tiny_config, monkeypatch):
    """Remedy: a group of their own (training/optim.py); without it states are looked up at the wrong place."""

    def misplaced(one):
        wrong = []
        for part in one.optimizer.chained_optimizers:
            for parameter, (group, order) in part.model_param_group_index_map.items():
                main = part.optimizer.param_groups[group]["params"][order]
                if main.numel() != parameter.numel() or not torch.equal(main.flatten(), parameter.flatten().float()):
                    wrong.append(parameter)
        return wrong

    config = tiny_config("training.precision=bf16")
    assert not misplaced(rig(config))
    grouped = optim.group_overrides
    monkeypatch.setattr(
        optim,
        "group_overrides",
        lambda *args: {key: value for key, value in grouped(*args).items() if key.attr != "is_fp32_param"},
    )
    assert misplaced(rig(config))


def test_overlapped_reduction_demands_a_gradient_of_every_parameter(rig, tiny_config, batch_of, monkeypatch):
    """Remedy: the KL stays attached with coefficient 0 (model/attention.py)."""

    def two_steps(attached: bool):
        one = rig(tiny_config())
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
        (chunk,) = build_model(one.spec, 20)
        ddp = DistributedDataParallel(chunk.config, config, chunk)
        if not attached:
            monkeypatch.setattr("msa_pretrain.model.attention.AttachLoss.apply", lambda output, loss: output)
        for _ in range(2):  # Megatron learns in the first step which gradients to wait for
            ddp.zero_grad_buffer()
            run_micro_batches([ddp], one.spec, [batch_of(0, 20)], StepPlan(phase=Phase.sparse, kl_coef=0.0))

    two_steps(attached=True)
    with pytest.raises(AssertionError):
        two_steps(attached=False)


def test_parallel_layers_without_their_own_initialisation_do_not_say_that_they_are_sharded(tiny_config, monkeypatch):
    """Remedy: mark_shards. Without the mark a gradient norm counts the shares of tensor-parallel rank 0 alone."""
    config = tiny_config("model.num_kv_heads=2", "parallel.tensor=2", "parallel.sequence=true")

    def marked():
        with fake_rank(config.parallel, rank=1, world_size=2):
            (model,) = build_on_meta(config.spec, 20)
        return {name for name, weight in model.named_parameters() if getattr(weight, "tensor_model_parallel", False)}

    ours = marked()
    monkeypatch.setattr(gpt, "mark_shards", lambda model: None)
    attention = [
        f"decoder.layers.{layer}.self_attention.linear_{name}.weight" for layer in (0, 1) for name in ("qkv", "proj")
    ]
    mlp = [f"decoder.layers.0.mlp.linear_{name}.weight" for name in ("fc1", "fc2")]
    assert ours - marked() == {"embedding.word_embeddings.weight", "output_layer.weight", *attention, *mlp}


def test_the_expert_bias_of_megatron_moves_before_anyone_knows_of_a_nan():
    """Remedy: our own router, updated by the trainer after the step. Megatron updates in finalize_model_grads."""
    import inspect

    from megatron.core.distributed import finalize_model_grads

    source = inspect.getsource(finalize_model_grads)
    assert "_update_router_expert_bias" in source
