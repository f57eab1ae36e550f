"""Multi-token prediction against a plain computation, in packed documents and in every way of running a step."""

import pytest
import torch
from torch.nn import functional as F

from msa_pretrain.model.config import Phase
from msa_pretrain.model.parameters import count_parameters, mtp_parameters
from msa_pretrain.training.balance import balance_experts
from msa_pretrain.training.step import StepPlan, run_micro_batches

MTP = ["model.mtp_layers=2", "moe.aux_loss_coef=0.1"]


def step(one, *batches, mtp_coef=0.5, kl_coef=1.0, phase=Phase.sparse):
    """(gradients, sums, load metrics) of one step."""
    for chunk in one.chunks:
        chunk.zero_grad_buffer()
    plan = StepPlan(phase=phase, kl_coef=kl_coef, mtp_coef=mtp_coef)
    sums = run_micro_batches(one.chunks, one.spec, list(batches), plan)
    load = balance_experts(one.chunks, one.spec, applied=False, valid_rows=sums.valid_rows, num_layers_logged=9)
    return one.gradients(), sums, load


def test_each_depth_has_the_loss_of_a_plain_computation(rig, tiny_config, batch_of):
    """Inputs, combination and targets by loops over documents; the transformer layers inside are tested elsewhere."""
    one, lengths = rig(tiny_config(*MTP)), (9, 2, 1, 8)
    batch, seen = batch_of(0, *lengths, masked_every=5), []
    model, (first, second) = one.model, one.model.mtp.layers
    model.decoder.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for layer in (first, second):
        layer.transformer_layer.register_forward_hook(
            lambda module, args, kwargs, output: seen.append((kwargs["hidden_states"], output[0])), with_kwargs=True
        )
    _, sums, _ = step(one, batch)
    state, *inner = seen
    tokens, labels, mask = batch.tokens[0], batch.labels[0], batch.loss_mask[0]

    def norm(module, x):
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * module.weight

    def ahead(values, depth):
        """The value `depth` tokens on in the same document; 0 where there is none."""
        found, start = torch.zeros_like(values), 0
        for length in lengths:
            for place in range(start, start + length - depth):
                found[place] = values[place + depth]
            start += length
        return found

    for depth, (layer, (entered, left)) in enumerate(zip((first, second), inner, strict=True), start=1):
        embedded = model.embedding.word_embeddings.weight[ahead(tokens, depth)][:, None]
        both = torch.cat([norm(layer.enorm, embedded), norm(layer.hnorm, state)], dim=-1)
        torch.testing.assert_close(entered, both @ layer.eh_proj.weight.t(), rtol=1e-5, atol=1e-6)
        state = norm(layer.final_layernorm, left)
        losses = F.cross_entropy((state @ model.output_layer.weight.t())[:, 0], ahead(labels, depth), reduction="none")
        targets = ahead(mask, depth)
        assert 0 < targets.sum() < 20 - 4 * depth
        assert sums.mtp_losses[depth - 1] == pytest.approx(((losses * targets).sum() / targets.sum()).item(), rel=1e-5)


def test_the_gradient_is_that_of_the_mean_over_targets(rig, tiny_config, batch_of):
    """The second depth's projection against finite differences of coefficient x mean over depths of the logged loss."""
    one, batches = rig(tiny_config("model.mtp_layers=2")), (batch_of(0, 13, 7, masked_every=3), batch_of(1, 20))
    name = "mtp.layers.1.eh_proj.weight"
    gradients, sums, _ = step(one, *batches, kl_coef=0.0, phase=Phase.warmup)
    direction = gradients[name] / gradients[name].norm()
    losses = []
    for size in (1e-2, -1e-2):
        with torch.no_grad():
            dict(one.model.named_parameters())[name].add_(size * direction)
        losses.append(sum(step(one, *batches, phase=Phase.warmup)[1].mtp_losses) / 2)
        with torch.no_grad():
            dict(one.model.named_parameters())[name].sub_(size * direction)
    slope = 0.5 * (losses[0] - losses[1]) / 2e-2
    assert slope == pytest.approx(gradients[name].norm().item(), rel=2e-3)
    assert sums.mtp_losses[0] == pytest.approx(3.69, abs=0.2)  # ln 40


def test_only_rows_with_a_target_have_a_kl_in_an_mtp_layer(rig, tiny_config, batch_of):
    """Documents of 1 and 2 tokens have no target at depth 1; the decoder's layers have rows there all the same."""
    one = rig(tiny_config("model.mtp_layers=1"))
    gradients, sums, _ = step(one, batch_of(0, 2, 2, 1), mtp_coef=0.0)
    assert sums.kl[1] > 0 and sums.kl[2] == 0 and sums.mtp_losses == [0.0]
    assert not any(value.any() for name, value in gradients.items() if name.startswith("mtp.") and "router" not in name)
    gradients, sums, _ = step(one, batch_of(0, 7, 13), mtp_coef=0.0)
    assert sums.kl[2] > 0
    index = {name for name, value in gradients.items() if name.startswith("mtp.") and value.any()}
    assert index and all(".indexer." in name for name in index)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_nothing(rig, tiny_config, batch_of, recompute):
    batches = batch_of(0, 13, 7), batch_of(1, 5, 15)
    wanted, sums, load = step(rig(tiny_config(*MTP)), *batches)
    gradients, again, loads = step(rig(tiny_config(*MTP, f"training.recompute={recompute}")), *batches)
    assert again.mtp_losses == sums.mtp_losses and again.kl == sums.kl and loads == load
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-8)


def test_every_parameter_is_counted_and_trained(rig, tiny_config, batch_of):
    one = rig(tiny_config(*MTP, "moe.shared_hidden_size=10"))
    counts = count_parameters(one.spec)
    built = {name: parameter.numel() for name, parameter in one.model.named_parameters()}
    assert sum(built.values()) == counts.total
    mtp = sum(size for name, size in built.items() if name.startswith("mtp."))
    # eh_proj, five norms, QKV and output with head norms, index branch, router, 5 experts and the shared one
    one_layer = 2 * 24 * 24 + 5 * 24 + 24 * 18 * 8 + 2 * 8 + 24 * 4 * 4 + 2 * 4 + 5 * 24 + 3 * 24 * (5 * 16 + 10)
    assert mtp == counts.mtp == 2 * mtp_parameters(one.spec) == 2 * one_layer
    gradients, _, load = step(one, batch_of(0, 20))
    assert all(value.any() and value.isfinite().all() for value in gradients.values())
    assert {"moe/max_over_mean_load/layer_1", "moe/max_over_mean_load/layer_3"} <= set(load)


def test_the_decoder_and_its_loss_are_those_of_a_model_without(rig, tiny_config, batch_of):
    plain_gradients, plain, _ = step(rig(tiny_config()), batch_of(0, 13, 7))
    gradients, sums, _ = step(rig(tiny_config("model.mtp_layers=2")), batch_of(0, 13, 7), mtp_coef=0.0)
    assert sums.lm_loss == plain.lm_loss and all(sums.kl[layer] == plain.kl[layer] for layer in plain.kl)
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-8)
