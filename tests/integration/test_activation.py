"""Gated activations in experts, shared expert and plain MLP against their formulas (spec: MiniMax-M3's SwiGLU-OAI)."""

import pytest
import torch
from torch.nn import functional as F

from msa_pretrain.model.config import Phase


def clamped(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


FORMULAS = {"swiglu": lambda gate, up: F.silu(gate) * up, "swiglu_oai": clamped}


@pytest.mark.parametrize("activation", FORMULAS)
def test_every_mlp_uses_the_formula(rig, tiny_config, batch_of, activation):
    """One layer with a plain MLP, one with experts and a shared expert, weights large enough to reach the clamps."""
    shapes = ["moe.shared_hidden_size=12", "moe.routed_scaling=2.0"]
    one = rig(tiny_config(f"model.activation={activation}", *shapes))
    dense, sparse = (layer.mlp for layer in one.model.decoder.layers)
    with torch.no_grad():
        for mlp in (dense, sparse.shared_experts):
            mlp.linear_fc1.weight.mul_(100)
        sparse.experts.gate_up_proj.mul_(100)
    seen = {}

    def keep(name):
        return lambda module, inputs, output: seen.__setitem__(name, (inputs, output))

    for name, module in (("dense", dense), ("moe", sparse), ("router", sparse.router)):
        module.register_forward_hook(keep(name))
    one.backward(batch_of(0, 20), phase=Phase.warmup)
    gated = FORMULAS[activation]

    def plain(mlp, tokens):
        gate, up = (tokens @ mlp.linear_fc1.weight.double().t()).chunk(2, dim=-1)
        if activation == "swiglu_oai":
            assert gate.max() > 7 and up.min() < -7 and up.max() > 7
        return gated(gate, up) @ mlp.linear_fc2.weight.double().t()

    (tokens,), (output, _) = seen["dense"]
    torch.testing.assert_close(output.double(), plain(dense, tokens.double()), rtol=1e-5, atol=1e-6)
    (tokens,), (output, _) = seen["moe"]
    flat = tokens.double().flatten(0, 1)
    # M3: the factor is on the routed sum alone
    expected = plain(sparse.shared_experts, flat)
    probs, _ = seen["router"][1]
    torch.testing.assert_close(probs.sum(dim=1), torch.full((20,), 2.0))
    for expert in range(5):
        gate, up = (flat @ sparse.experts.gate_up_proj[expert].flatten(0, -2).double().t()).chunk(2, dim=-1)
        share = probs[:, expert, None].double()
        expected = expected + share * (gated(gate, up) @ sparse.experts.down_proj[expert].double().t())
    torch.testing.assert_close(output.flatten(0, 1).double(), expected, rtol=1e-5, atol=1e-6)


def test_zero_weights_give_zero_under_the_clamped_activation(rig, tiny_config, batch_of):
    """gate = 0 makes 0 * (0 + 1) = 0, so an expert of zeros adds nothing."""
    one = rig(tiny_config("model.activation=swiglu_oai"))
    sparse, outputs = one.model.decoder.layers[1].mlp, []
    with torch.no_grad():
        sparse.experts.gate_up_proj.zero_()
    sparse.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    one.backward(batch_of(0, 20), phase=Phase.warmup)
    assert not outputs[0].any()
