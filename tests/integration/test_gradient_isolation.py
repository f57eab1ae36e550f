"""Who gets which gradient: the KL trains the index branch and nothing else, the LM loss everything else (spec 3)."""

from dataclasses import replace

import pytest
import torch

from msa_pretrain.model.config import Phase
from msa_pretrain.training.optim import clip_and_step

PHASES = [Phase.warmup, Phase.sparse]
DOCUMENTS = (13, 1, 6)


def without_lm_loss(batch):
    """The batch with every LM loss multiplied by zero, its denominator untouched."""
    return replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))


def is_zero(gradients):
    return {name for name, gradient in gradients.items() if not gradient.any()} == set(gradients)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_kl_alone_leaves_the_backbone_without_gradient(rig, tiny_config, batch_of, phase):
    rig = rig(tiny_config())
    rig.backward(without_lm_loss(batch_of(0, *DOCUMENTS)), phase=phase)
    backbone, index = rig.split(rig.gradients())
    assert is_zero(backbone)
    assert all(gradient.any() for gradient in index.values()), [n for n, g in index.items() if not g.any()]
    # both projections and both norms of both layers
    assert len(index) == 2 * 4


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_lm_loss_alone_leaves_the_index_branch_without_gradient(rig, tiny_config, batch_of, phase):
    rig = rig(tiny_config())
    rig.backward(batch_of(0, *DOCUMENTS), phase=phase, kl_coef=0.0)
    backbone, index = rig.split(rig.gradients())
    assert is_zero(index)
    silent = {name for name, gradient in backbone.items() if not gradient.any()}
    assert not silent


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_switching_the_detach_off_lets_the_kl_reach_the_backbone(rig, tiny_config, batch_of, phase):
    rig = rig(tiny_config("attention.detach=false"))
    rig.backward(without_lm_loss(batch_of(0, *DOCUMENTS)), phase=phase)
    backbone, _ = rig.split(rig.gradients())
    moved = {name for name, gradient in backbone.items() if gradient.any()}
    # through the input of the second layer's index branch down to the embedding; never into a layer's own main branch
    assert {"embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_qkv.weight"} <= moved
    assert "decoder.layers.1.self_attention.linear_qkv.weight" not in moved
    assert "decoder.layers.1.mlp.experts.down_proj" not in moved


def test_masking_a_third_of_the_targets_leaves_the_index_gradient_unchanged(rig, tiny_config, batch_of):
    rig = rig(tiny_config())
    gradients = []
    for masked_every in (0, 3):
        rig.backward(batch_of(0, *DOCUMENTS, masked_every=masked_every), phase=Phase.sparse)
        gradients.append(rig.split(rig.gradients()))
    (backbone, index), (masked_backbone, masked_index) = gradients
    for name, gradient in index.items():
        # measured 4e-7: the two runs scale by 17 and 11 LM tokens before the division, in fp32
        assert (masked_index[name] - gradient).norm() <= 2e-6 * gradient.norm(), name
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert (masked_backbone[name] - backbone[name]).abs().max() > 1e-3 * backbone[name].abs().max()


def test_lambda_acts_on_index_weights_only_through_eps_and_clip(rig, tiny_config, batch_of):
    config = tiny_config("optim.indexer_clip_norm=1e9", "optim.eps=1e-20")
    weights = []
    for kl_coef in (1.0, 100.0):
        one = rig(config)
        one.backward(batch_of(0, *DOCUMENTS), phase=Phase.sparse, kl_coef=kl_coef)
        assert clip_and_step(one.optimizer, {"backbone": 1.0, "indexer": 1e9}).applied
        weights.append(one.split(one.weights()))
    (backbone, index), (backbone_100, index_100) = weights
    for name, weight in backbone.items():
        assert torch.equal(backbone_100[name], weight), name
    for name, weight in index.items():
        torch.testing.assert_close(index_100[name], weight, rtol=1e-5, atol=1e-7)
    # with the clip at work, the two gradients are scaled to the same norm as well
    clipped = []
    for kl_coef in (1.0, 100.0):
        one = rig(config)
        one.backward(batch_of(0, *DOCUMENTS), phase=Phase.sparse, kl_coef=kl_coef)
        norms = clip_and_step(one.optimizer, {"backbone": 1.0, "indexer": 1e-4}).norms
        clipped.append((norms, one.split(one.weights())[1]))
    assert clipped[1][0]["indexer"] == pytest.approx(100 * clipped[0][0]["indexer"], rel=1e-5)


def test_the_kl_coefficient_never_moves_the_backbone(rig, tiny_config, batch_of):
    """Field case T1.12: separate clip groups, so a KL gradient of any size leaves the backbone's step alone."""
    config = tiny_config()
    weights = []
    for kl_coef in (0.0, 10.0):
        one = rig(config)
        one.backward(batch_of(0, *DOCUMENTS), phase=Phase.sparse, kl_coef=kl_coef)
        clip_and_step(one.optimizer, {"backbone": 0.01, "indexer": 0.01})
        weights.append(one.split(one.weights())[0])
    for name, weight in weights[0].items():
        assert torch.equal(weights[1][name], weight), name


def test_each_group_is_clipped_to_its_own_limit(rig, tiny_config, batch_of):
    rig = rig(tiny_config())
    rig.backward(batch_of(0, *DOCUMENTS), phase=Phase.sparse)
    backbone, index = rig.split(rig.gradients())

    def norm(tensors):
        return torch.cat([tensor.flatten().double() for tensor in tensors.values()]).norm().item()

    outcome = clip_and_step(rig.optimizer, {"backbone": 0.5 * norm(backbone), "indexer": 0.1 * norm(index)})
    assert outcome.norms["backbone"] == pytest.approx(norm(backbone), rel=1e-5)
    assert outcome.norms["indexer"] == pytest.approx(norm(index), rel=1e-5)
    clipped_backbone, clipped_index = rig.split(rig.gradients())
    assert norm(clipped_backbone) == pytest.approx(0.5 * norm(backbone), rel=1e-5)
    assert norm(clipped_index) == pytest.approx(0.1 * norm(index), rel=1e-5)
