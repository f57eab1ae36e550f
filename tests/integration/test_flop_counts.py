"""The arithmetic of FLOPs against what torch counts in a real forward and backward pass."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from msa_pretrain.model.config import Phase, Recompute
from msa_pretrain.model.flops import attention_forward, linear_flops
from msa_pretrain.training.planner.activations import Activations
from msa_pretrain.training.planner.stages import Layout, held_by_chunk
from msa_pretrain.training.planner.work import grouped_mm_flops, products_done

TOKENS = 20
CASES = {
    "dense": (Phase.dense, ["attention=dense", "training.warmup_tokens=0"]),
    "warm-up": (Phase.warmup, []),
    "sparse": (Phase.sparse, []),
    "index branch not detached": (Phase.sparse, ["attention.detach=false"]),
    "shared expert, selective": (Phase.sparse, ["moe.shared_hidden_size=10", "training.recompute=selective"]),
    "MTP": (Phase.sparse, ["model.mtp_layers=2"]),
    "MTP, full": (Phase.warmup, ["model.mtp_layers=1", "training.recompute=full"]),
    "full": (Phase.dense, ["attention=dense", "training.warmup_tokens=0", "training.recompute=full"]),
}


@pytest.mark.parametrize("phase, overrides", CASES.values(), ids=CASES)
def test_products_with_weights_are_those_that_torch_counts(rig, tiny_config, batch_of, phase, overrides):
    """Attention is counted apart: its operations come as bmm, and the student's scores as mm."""
    model = rig(tiny_config(*overrides))
    spec = model.spec
    grouped = {torch.ops.aten._grouped_mm: grouped_mm_flops}
    with FlopCounterMode(display=False, custom_mapping=grouped) as counter:
        model.backward(batch_of(0, TOKENS), phase=phase)
    counted = counter.get_flop_counts()["Global"]
    total = counted[torch.ops.aten.mm] + counted[torch.ops.aten._grouped_mm]
    if spec.msa_layers:  # index queries of all groups with the keys, forward and two gradients, masked pairs included
        student = 3 * 2 * TOKENS**2 * spec.model.num_kv_heads * spec.attention.index_dim
        total -= (len(spec.msa_layers) + len(spec.mtp_layers)) * student
    held = held_by_chunk(spec)[0][0]
    activations = Activations(spec, Layout(spec.parallel, 1), TOKENS, phase)
    assert total == products_done(activations, held)
    if spec.recompute is Recompute.none:
        assert total == linear_flops(spec) * TOKENS


def test_attention_of_the_reference_against_the_formula(rig, tiny_config, batch_of):
    """The reference multiplies masked pairs too, and its backward keeps the probabilities: two products forward and
    four backward over t^2 pairs, where the formula has two and five (the scores again) over t (t + 1) / 2."""
    model = rig(tiny_config("attention=dense", "training.warmup_tokens=0"))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_mm_flops}) as counter:
        model.backward(batch_of(0, TOKENS), phase=Phase.dense)
    main, _, _ = attention_forward(model.spec, [TOKENS], Phase.dense)
    forward = main / (TOKENS * (TOKENS + 1) / 2) * TOKENS**2
    assert counter.get_flop_counts()["Global"][torch.ops.aten.bmm] == model.spec.model.num_layers * 3 * forward
