"""The router's losses against loops over documents, experts and tokens in float64."""

import math

import pytest
import torch

from msa_pretrain.model.balance_losses import router_z_loss, sequence_balance_loss

DOCUMENTS = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2, 2, -1, -1])  # lengths 5, 1, 3 and two padding rows


def routing(logits, k, bias=0.0):
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, (logits.sigmoid() + bias).topk(k).indices, True)


def by_loops(logits, chosen, documents, k):
    """sum over documents of T * sum_e (e / (k T) * count_e) * (1 / T * sum_t s_te / sum_e s_te)."""
    total, experts = 0.0, logits.shape[1]
    for document in {number for number in documents.tolist() if number >= 0}:
        rows = [row for row, number in enumerate(documents.tolist()) if number == document]
        for expert in range(experts):
            load = experts / (k * len(rows)) * sum(chosen[row, expert].item() for row in rows)
            shares = [
                1 / (1 + math.exp(-logits[row, expert])) / sum(1 / (1 + math.exp(-value)) for value in logits[row])
                for row in rows
            ]
            total += len(rows) * load * sum(shares) / len(rows)
    return total


@pytest.mark.parametrize("k", [1, 2, 3])
def test_balance_loss_equals_the_loops(k):
    logits = torch.randn(11, 7, generator=torch.Generator().manual_seed(k))
    chosen = routing(logits, k, bias=torch.linspace(-0.3, 0.3, 7))
    loss = sequence_balance_loss(logits, chosen, DOCUMENTS, k)
    assert loss.item() == pytest.approx(by_loops(logits.double(), chosen, DOCUMENTS, k), rel=1e-6)


def test_balance_loss_is_the_length_when_loads_are_equal_and_e_over_k_times_it_when_all_choose_the_same():
    logits = torch.full((6, 6), -60.0)
    equal = torch.eye(6, dtype=torch.bool)
    documents = torch.zeros(6, dtype=torch.int64)
    assert sequence_balance_loss(logits, equal, documents, 1).item() == pytest.approx(6.0)
    logits[:, 2] = 30.0
    one = torch.zeros(6, 6, dtype=torch.bool)
    one[:, 2] = True
    assert sequence_balance_loss(logits, one, documents, 1).item() == pytest.approx(36.0)


def test_balance_loss_of_a_softmax_router_takes_its_scores():
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(2))
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(2).indices, True)
    loss = sequence_balance_loss(logits, chosen, torch.zeros(9, dtype=torch.int64), 2, sigmoid=False)
    load = 5 / (2 * 9) * chosen.sum(dim=0)
    assert loss.item() == pytest.approx((load * logits.double().softmax(dim=-1)).sum().item(), rel=1e-6)


def test_scores_that_underflow_do_not_lower_the_balance_loss():
    """Case 2.9: sigmoid(-95) is below what an epsilon of 1e-20 leaves; the loss is that of the same softmax."""
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)) - 95
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(2).indices, True)
    documents = torch.zeros(9, dtype=torch.int64)
    logits.requires_grad_()
    loss = sequence_balance_loss(logits, chosen, documents, 2)
    # far below zero the sigmoid is an exponential, so its share is the softmax
    load = 5 / (2 * 9) * chosen.sum(dim=0)
    expected = (load * logits.detach().double().softmax(dim=-1)).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and loss.item() >= 9
    loss.backward()
    assert logits.grad.isfinite().all() and logits.grad.any()


def test_losses_do_not_depend_on_the_packing_and_padding_adds_nothing():
    logits = torch.randn(11, 7, generator=torch.Generator().manual_seed(4), requires_grad=True)
    chosen = routing(logits.detach(), 2)
    together = sequence_balance_loss(logits, chosen, DOCUMENTS, 2) + router_z_loss(logits, DOCUMENTS)
    (gradient,) = torch.autograd.grad(together, logits)
    apart = 0.0
    for rows in (slice(0, 5), slice(5, 6), slice(6, 9)):
        alone = torch.zeros(rows.stop - rows.start, dtype=torch.int64)
        apart += sequence_balance_loss(logits[rows], chosen[rows], alone, 2) + router_z_loss(logits[rows], alone)
    torch.testing.assert_close(together, apart)
    assert not gradient[9:].any() and gradient[:9].all()


def test_ranks_that_share_documents_have_the_loss_and_gradient_of_one(monkeypatch):
    """Sequence parallelism: rows 0-5 and 6-11 on two ranks, the first document reaching over the border."""
    documents = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1])
    logits = torch.randn(12, 7, generator=torch.Generator().manual_seed(5), requires_grad=True)
    chosen = routing(logits.detach(), 2)
    halves = (slice(0, 6), slice(6, 12))
    sums = []
    pair = type("Group", (), {"size": lambda self: 2})()
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group: sums.append(tensor.clone()))
    for rows in halves:
        sequence_balance_loss(logits[rows], chosen[rows], documents[rows], 2, pair)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group: tensor.copy_(sums[0] + sums[1]))
    shared = sum(sequence_balance_loss(logits[rows], chosen[rows], documents[rows], 2, pair) for rows in halves)
    alone = sequence_balance_loss(logits, chosen, documents, 2)
    torch.testing.assert_close(shared, alone)
    torch.testing.assert_close(torch.autograd.grad(shared, logits), torch.autograd.grad(alone, logits))


def test_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0], [5.0, 5.0]])
    documents = torch.tensor([0, 0, -1])
    assert router_z_loss(logits, documents).item() == pytest.approx(math.log(2) ** 2 + math.log(4) ** 2)
