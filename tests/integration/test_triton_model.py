"""The model with attention.backend=triton (interpreted on the CPU): against the reference backend, and recomputed."""

import pytest
import torch

from msa_pretrain.model.config import Phase

# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SIZES = ["attention.block_size=16", "model.head_dim=16", "attention.index_dim=16", "model.rotary_dim=8"]
DOCUMENTS = (40, 3, 21)  # one past k * l = 32, two on the dense route


def step(rig, batch, phase):
    sums = rig.backward(batch, phase=phase)
    return {"lm": sums.lm_loss, **{f"kl {layer}": value for layer, value in sums.kl.items()}}, rig.gradients()


@pytest.mark.parametrize("phase", [Phase.warmup, Phase.sparse], ids=lambda phase: phase.name)
def test_backends_agree_and_recompute_changes_no_bit(rig, tiny_config, batch_of, phase):
    batch = batch_of(0, *DOCUMENTS)
    runs = [
        step(rig(tiny_config(f"attention.backend={backend}", f"training.recompute={recompute}", *SIZES)), batch, phase)
        for backend, recompute in (("triton", "none"), ("triton", "full"), ("reference", "none"))
    ]
    (plain, gradients), (again, recomputed), (expected, reference) = runs
    assert again == plain  # each KL once
    for name, gradient in gradients.items():
        assert torch.equal(recomputed[name], gradient), name
        scale = reference[name].abs().max()
        assert scale > 0 and (gradient - reference[name]).abs().max() <= 1e-5 * scale, name
    assert plain == pytest.approx(expected, rel=1e-6)
