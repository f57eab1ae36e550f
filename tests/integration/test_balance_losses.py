"""The router's losses in the model: their share of the gradient, and that no way of running a step changes it."""

from dataclasses import replace

import pytest
import torch

from msa_pretrain.data.dataset import Sample
from msa_pretrain.data.packing import PackedBatch, collate
from msa_pretrain.kernels import Segments
from msa_pretrain.model.config import Phase
from msa_pretrain.model.gpt import routers
from msa_pretrain.training.balance import balance_experts

AUX, Z = 0.5, 0.02
LOSSES = [f"moe.aux_loss_coef={AUX}", f"moe.z_loss_coef={Z}"]
ROUTER = "decoder.layers.1.mlp.router.weight"


def joined(*batches: PackedBatch) -> PackedBatch:
    """The documents of all batches in one micro-batch."""
    samples = [
        Sample(
            batch.tokens[0],
            batch.labels[0],
            batch.loss_mask[0].bool(),
            tuple(row[1] for row in batch.segments.rows),
            tuple(dict.fromkeys(batch.document_ids.tolist())),
        )
        for batch in batches
    ]
    return collate(samples)


def step(one, *batches):
    """(gradients, metrics) of one step over `batches`, the index branch's loss left out."""
    sums = one.backward(*batches, phase=Phase.sparse, kl_coef=0.0)
    load = balance_experts(one.chunks, one.spec, applied=False, valid_rows=sums.valid_rows, num_layers_logged=0)
    return one.gradients(), load


def expected(logits, chosen, lengths, k):
    """(balance, z) loss, each a mean over the documents' tokens, in float64 with a graph to `logits`."""
    shares = logits.sigmoid() / logits.sigmoid().sum(dim=-1, keepdim=True)
    start, balance = 0, 0.0
    for length in lengths:
        rows = slice(start, start + length)
        load = logits.shape[1] / (k * length) * chosen[rows].sum(dim=0)
        balance = balance + (load * shares[rows].sum(dim=0)).sum()
        start += length
    return balance / start, logits[:start].logsumexp(dim=-1).square().sum() / start


def test_gradient_and_metrics_are_those_of_a_mean_over_tokens(rig, tiny_config, batch_of):
    """Masking a third of the LM targets and splitting the step in two must not change it: the denominator is rows."""
    batches = [batch_of(0, 13, 7, masked_every=3), batch_of(1, 20)]
    plain, _ = step(rig(tiny_config()), *batches)
    one = rig(tiny_config(*LOSSES))
    (_, router), *_ = routers(one.chunks)
    seen = []
    router.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].detach(), output[1])))
    gradients, load = step(one, *batches)
    weight = router.weight.detach().double().requires_grad_()
    logits = torch.cat([hidden for hidden, _ in seen]).flatten(0, 1).double() @ weight.t()
    balance, z_loss = expected(logits, torch.cat([chosen for _, chosen in seen]), (13, 7, 20), k=2)
    (AUX * balance + Z * z_loss).backward()
    torch.testing.assert_close((gradients[ROUTER] - plain[ROUTER]).double(), weight.grad, rtol=1e-4, atol=1e-7)
    assert weight.grad.abs().max() > 1e-3
    assert load["moe/aux_loss"] == pytest.approx(balance.item(), rel=1e-6)
    assert load["moe/z_loss"] == pytest.approx(z_loss.item(), rel=1e-6)
    assert load["moe/weighted_losses"] == pytest.approx(AUX * balance.item() + Z * z_loss.item(), rel=1e-6)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_neither_gradients_nor_counts_nor_logged_losses(rig, tiny_config, batch_of, recompute):
    """T2.6, with two micro-batches whose documents differ: a recomputed layer must see those of its own."""
    batches = [batch_of(0, 13, 7), batch_of(1, 5, 15)]
    wanted, load = step(rig(tiny_config(*LOSSES)), *batches)
    one = rig(tiny_config(*LOSSES, f"training.recompute={recompute}"))
    gradients, again = step(one, *batches)
    assert again == load
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-8)


def test_micro_batches_and_packing_change_nothing(rig, tiny_config, batch_of):
    batches = [batch_of(0, 13, 7, masked_every=4), batch_of(1, 20)]
    apart, load = step(rig(tiny_config(*LOSSES)), *batches)
    together, again = step(rig(tiny_config(*LOSSES)), joined(*batches))
    assert again == pytest.approx(load, rel=1e-6)
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-4, atol=1e-7)


def test_padding_is_in_no_loss_and_no_count(rig, tiny_config, batch_of):
    whole = batch_of(0, 13, 7)
    short = batch_of(0, 13)
    borders = Segments.from_cu_seqlens([0, 13], num_tokens=20)
    mask = whole.loss_mask.clone()
    mask[:, 12:] = 0
    padded = replace(whole, segments=borders, loss_mask=mask, num_valid_rows=13, num_target_tokens=int(mask.sum()))
    short = replace(
        short, tokens=whole.tokens[:, :13], labels=whole.labels[:, :13], loss_mask=mask[:, :13], num_target_tokens=12
    )
    wanted, load = step(rig(tiny_config(*LOSSES)), short)
    gradients, again = step(rig(tiny_config(*LOSSES)), padded)
    assert again == pytest.approx(load, rel=1e-6)
    torch.testing.assert_close(gradients[ROUTER], wanted[ROUTER], rtol=1e-4, atol=1e-7)


def test_coefficients_of_zero_are_the_run_without_losses(rig, tiny_config, batch_of):
    """No loss key, and the same gradients bit for bit."""
    plain, load = step(rig(tiny_config()), batch_of(0, 20))
    again, _ = step(rig(tiny_config("moe.aux_loss_coef=0.0")), batch_of(0, 20))
    assert "moe/aux_loss" not in load and all(torch.equal(plain[name], again[name]) for name in plain)


def test_evaluation_between_steps_counts_nothing_and_attaches_nothing(rig, tiny_config, batch_of):
    """T2.7: three validations in the middle of a step's micro-batches."""
    from msa_pretrain.training.step import StepPlan, run_micro_batches

    one = rig(tiny_config(*LOSSES))
    wanted, load = step(one, batch_of(0, 20))
    one.backward(batch_of(0, 20), phase=Phase.sparse, kl_coef=0.0)
    (_, router), *_ = routers(one.chunks)
    bias = router.expert_bias.clone()
    one.chunks[0].eval()
    with torch.no_grad():
        for seed in range(3):
            run_micro_batches(one.chunks, one.spec, [batch_of(seed, 20)], StepPlan(Phase.sparse, forward_only=True))
    one.chunks[0].train()
    again = balance_experts(one.chunks, one.spec, applied=False, valid_rows=20, num_layers_logged=0)
    assert again == load and torch.equal(router.expert_bias, bias)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in one.gradients().items())
