"""The whole Megatron model against what it must equal."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from msa_pretrain.data.dataset import Sample
from msa_pretrain.data.packing import collate
from msa_pretrain.model.config import Phase, RopeScaling
from msa_pretrain.model.experts import GroupedExperts
from msa_pretrain.model.norm import RMSNorm
from msa_pretrain.model.parameters import count_parameters
from msa_pretrain.model.rope import apply_rotation, rotation
from msa_pretrain.training.evaluation import evaluate
from msa_pretrain.training.step import StepPlan, run_micro_batches, sampled_rows

VARIANTS = {
    "tiny": [],
    "full-vector norms": ["model.qk_norm=full_vector"],
    "no norms": ["model.qk_norm=none", "attention.index_norm=false"],
    "zero-centred norms": ["model.zero_centered_norms=true"],
    "softmax router": ["moe.score_function=softmax", "moe.bias_update_rate=0", "moe.aux_loss_coef=0.01"],
    "scaled rotation": ["model.rope_scaling.factor=8", "model.rope_scaling.original_length=16"],
    "tied": ["model.tie_embeddings=true"],
    "shared expert": ["moe.shared_hidden_size=10"],
    "no dense MLP": ["moe.dense_mlp_layers=[]", "moe.dense_hidden_size=0"],
    "all dense MLP": ["moe.dense_mlp_layers=[0,1]"],
    "one full layer": ["attention.full_layers=[0]"],
    "GQA baseline": ["attention=dense", "training.warmup_tokens=0"],
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_parameter_counts_are_those_of_the_built_model(rig, tiny_config, overrides):
    rig = rig(tiny_config(*overrides))
    counts = count_parameters(rig.spec)
    built = {name: parameter.numel() for name, parameter in rig.model.named_parameters()}
    assert sum(built.values()) == counts.total
    assert sum(size for name, size in built.items() if ".indexer." in name) == counts.index
    assert (
        sum(size for name, size in built.items() if ".experts." in name or ".shared_experts." in name) == counts.experts
    )


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_takes_a_step_with_finite_gradients(rig, tiny_config, batch_of, overrides):
    rig = rig(tiny_config(*overrides))
    phase = Phase.sparse if rig.spec.msa_layers else Phase.dense
    sums = rig.backward(batch_of(0, 13, 1, 6), batch_of(1, 20), phase=phase)
    assert sums.lm_tokens == 13 + 1 + 6 + 20 - 4 and sums.valid_rows == 40
    assert sums.mean_lm_loss == pytest.approx(3.69, abs=0.1)  # ln 40
    assert all(gradient.isfinite().all() and gradient.any() for gradient in rig.gradients().values())


def loss_of(rig, batches, phase):
    with torch.no_grad():
        return run_micro_batches(rig.chunks, rig.spec, batches, StepPlan(phase=phase, forward_only=True)).mean_lm_loss


def test_warmup_is_the_dense_model_and_full_selection_is_too(rig, tiny_config, batch_of):
    """Initial weights depend on names alone, so the three models hold the same backbone."""
    batches = [batch_of(0, 13, 1, 6)]
    dense = loss_of(rig(tiny_config("attention=dense", "training.warmup_tokens=0")), batches, Phase.dense)
    msa = rig(tiny_config("attention.top_k=5"))  # 5 blocks of 4 hold every document
    assert loss_of(msa, batches, Phase.warmup) == pytest.approx(dense, rel=1e-6)
    assert loss_of(msa, batches, Phase.sparse) == pytest.approx(dense, rel=1e-6)
    assert abs(loss_of(rig(tiny_config()), batches, Phase.sparse) / dense - 1) > 1e-6


def test_a_dense_phase_of_a_model_with_index_branches_is_refused(rig, tiny_config, batch_of):
    rig = rig(tiny_config())
    with pytest.raises(ValueError, match="a model with index branches has no dense phase; use warmup or sparse"):
        rig.backward(batch_of(0, 5), phase=Phase.dense)


def test_packed_documents_equal_documents_alone(rig, tiny_config, batch_of):
    """Losses, KL sums and gradients of one packed micro-batch and of its documents one by one."""
    rig = rig(tiny_config())
    packed = batch_of(0, 9, 1, 7, 3)
    together = rig.backward(packed, phase=Phase.sparse)
    gradients = rig.gradients()
    alone, start = [], 0
    for length in (9, 1, 7, 3):
        part = slice(start, start + length)
        one = batch_of(0, length)
        alone.append(
            replace(
                one,
                tokens=packed.tokens[:, part],
                labels=packed.labels[:, part],
                loss_mask=packed.loss_mask[:, part],
            )
        )
        start += length
    apart = rig.backward(*alone, phase=Phase.sparse)
    assert apart.lm_tokens == together.lm_tokens and apart.valid_rows == together.valid_rows
    assert apart.lm_loss == pytest.approx(together.lm_loss, rel=1e-6)
    for layer, kl in together.kl.items():
        assert apart.kl[layer] == pytest.approx(kl, rel=1e-5)
    for name, gradient in rig.gradients().items():
        assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm() + 1e-9, name


@pytest.mark.parametrize("phase", [Phase.warmup, Phase.sparse])
def test_padding_changes_nothing(rig, tiny_config, batch_of, phase):
    """Packs that are not full: losses, KL, gradients and the experts' loads are those of the documents alone."""
    rig = rig(tiny_config())
    plain = [batch_of(0, 9, 1, 6), batch_of(1, 12)]
    seen = []
    for size in (0, 4):
        batches = [padded(batch, size) for batch in plain]
        assert all(batch.tokens.numel() - batch.num_valid_rows == size for batch in batches)
        sums = rig.backward(*batches, phase=phase, sample_rows=1000)
        loads = [module.take_counts() for module in rig.model.modules() if hasattr(module, "take_counts")]
        seen.append((sums, rig.gradients(), loads))
    (bare, gradients, loads), (full, full_gradients, full_loads) = seen
    assert loads and all(map(torch.equal, loads, full_loads))
    assert (full.lm_tokens, full.valid_rows) == (bare.lm_tokens, bare.valid_rows) == (24, 28)
    assert full.lm_loss == pytest.approx(bare.lm_loss, rel=1e-6)
    assert list(full.kl.values()) == pytest.approx(list(bare.kl.values()), rel=1e-5)
    assert all(full.quality[layer].num_rows == bare.quality[layer].num_rows == 28 for layer in bare.quality)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            full_gradients[name], gradient, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


def padded(batch, size):
    """The batch as one sample with `size` tokens of padding behind it."""
    lengths = tuple(row[1] for row in batch.segments.rows)
    ids = tuple(int(batch.document_ids[row[0]]) for row in batch.segments.rows)
    fill = torch.full((size,), 39)
    sample = Sample(
        torch.cat([batch.tokens[0], fill]),
        torch.cat([batch.labels[0], fill]),
        torch.cat([batch.loss_mask[0] > 0, fill < 0]),
        lengths,
        ids,
    )
    return collate([sample])


def test_a_future_token_changes_no_earlier_loss(rig, tiny_config, batch_of):
    rig = rig(tiny_config())
    batch = batch_of(0, 20)
    losses = []
    for token in (3, 4):
        tokens = batch.tokens.clone()
        tokens[0, 12] = token
        changed = replace(batch, tokens=tokens, loss_mask=(torch.arange(20) < 12)[None])
        losses.append(loss_of(rig, [changed], Phase.sparse))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("phase", [Phase.warmup, Phase.sparse], ids=lambda phase: phase.name)
def test_full_recompute_changes_nothing(rig, tiny_config, batch_of, phase):
    """Same gradients, same KL counted once, same expert counts (field cases 1.7, T2.6)."""
    results = []
    for recompute in ("none", "full", "selective"):
        one = rig(tiny_config(f"training.recompute={recompute}"))
        sums = one.backward(batch_of(0, 13, 7), batch_of(1, 20), phase=phase, sample_rows=10_000)
        counts = one.model.decoder.layers[1].mlp.router.tokens_per_expert.clone()
        results.append((sums, one.gradients(), counts))
    plain = results[0]
    assert plain[2].sum() == 2 * 40
    for sums, gradients, counts in results[1:]:
        assert sums.kl == plain[0].kl and sums.lm_loss == plain[0].lm_loss
        assert all(torch.equal(sums.quality[i].to_vector(), plain[0].quality[i].to_vector()) for i in sums.quality)
        assert torch.equal(counts, plain[2])
        assert all(torch.equal(gradient, plain[1][name]) for name, gradient in gradients.items())


def test_accumulation_does_not_change_kl_or_gradients(rig, tiny_config, batch_of):
    """Field case 1.2: the KL's weight must not grow with the number of micro-batches."""
    rig = rig(tiny_config())
    one, two = batch_of(0, 13, 7), batch_of(1, 20)
    sums = rig.backward(one, two, phase=Phase.sparse)
    gradients = rig.gradients()
    both = rig.backward(one, two, one, two, phase=Phase.sparse)
    assert both.mean_kl(1, 3) == pytest.approx(sums.mean_kl(1, 3), rel=1e-6)
    for name, gradient in rig.gradients().items():
        assert (gradient - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name


def test_training_state_is_untouched_by_evaluation(rig, tiny_config, batch_of):
    rig = rig(tiny_config())
    rig.backward(batch_of(0, 20), phase=Phase.sparse)
    router = rig.model.decoder.layers[1].mlp.router
    before = router.tokens_per_expert.clone(), router.expert_bias.clone(), rig.weights()

    class Two(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):

            tokens = torch.arange(21) % 40
            return Sample(tokens[:-1], tokens[1:], torch.ones(20, dtype=torch.bool), (20,), (index,))

    sums = evaluate(
        rig.chunks,
        rig.spec,
        Two(),
        phase=Phase.sparse,
        num_samples=2,
        sample_rows=40,
        micro_batch_size=1,
        dp_rank=0,
        dp_size=1,
    )
    assert sums.quality[0].num_rows == 40 and sums.quality[0].num_long_rows == 2 * (20 - 8)
    assert rig.model.training
    assert torch.equal(router.tokens_per_expert, before[0]) and torch.equal(router.expert_bias, before[1])
    assert all(torch.equal(weight, before[2][name]) for name, weight in rig.weights().items())


def test_sampled_rows_depend_on_document_and_position_alone(batch_of):
    batch = batch_of(3, 2000, 3000)
    rows = sampled_rows(batch, 0.1)
    assert len(rows) == pytest.approx(500, rel=0.15)
    names = {(int(batch.document_ids[row]), int(batch.positions[0, row])) for row in rows}
    swapped = replace(batch, document_ids=batch.document_ids.flip(0), positions=batch.positions.flip(1))
    rows = sampled_rows(swapped, 0.1)
    assert names == {(int(swapped.document_ids[row]), int(swapped.positions[0, row])) for row in rows}
    assert len(sampled_rows(batch, 1.0)) == 5000 and len(sampled_rows(batch, 0.0)) == 0


def test_initial_weights_depend_on_seed_and_name_alone(rig, tiny_config):
    one, again = rig(tiny_config()).weights(), rig(tiny_config("model.num_layers=1")).weights()
    shared = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(one[shared], again[shared])
    assert not torch.equal(one[shared], rig(tiny_config("training.seed=5")).weights()[shared])
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert one[qkv].std() == pytest.approx(0.02, rel=0.05)
    residual = "decoder.layers.0.self_attention.linear_proj.weight"
    assert one[residual].std() == pytest.approx(0.02 / 2, rel=0.05)  # sqrt(2 x 2 layers)
    assert one["decoder.layers.0.self_attention.indexer.key_norm.weight"].eq(1).all()


def test_rotation_is_the_half_split_form():
    positions = torch.tensor([0, 1, 7])
    cos, sin = rotation(positions, 4, 100.0)
    heads = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    turned = apply_rotation(heads, cos, sin)
    for t, position in enumerate(positions.tolist()):
        for pair, frequency in ((0, 1.0), (1, 100.0 ** (-2 / 4))):
            angle = torch.tensor(position * frequency)
            first, second = heads[t, :, pair], heads[t, :, pair + 2]
            torch.testing.assert_close(turned[t, :, pair], first * angle.cos() - second * angle.sin())
            torch.testing.assert_close(turned[t, :, pair + 2], second * angle.cos() + first * angle.sin())
    assert torch.equal(turned[..., 4:], heads[..., 4:]) and torch.equal(turned[0], heads[0])
    assert apply_rotation(heads, *rotation(positions, 0, 100.0)) is heads


def test_rotation_is_exact_at_a_million_tokens():
    cos, sin = rotation(torch.tensor([1_000_003]), 2, 10.0)
    exact = torch.tensor(1_000_003.0, dtype=torch.float64)
    assert abs(cos[0, 0, 0] - exact.cos()) < 1e-7 and abs(sin[0, 0, 0] - exact.sin()) < 1e-7


def test_scaled_rotation_slows_long_wavelengths():
    """Llama 3.1's rule at three pairs: a short wavelength stays, a long one is divided, one between goes part way."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64)
    theta = 1000.0
    cos, _ = rotation(torch.tensor([1]), 6, theta, scaling)
    wavelengths = [2 * math.pi * theta ** (pair / 3) for pair in range(3)]
    assert wavelengths[0] < 64 / 4 < wavelengths[1] < 64 < wavelengths[2]
    part = (64 / wavelengths[1] - 1) / (4 - 1)
    frequencies = [1.0, theta ** (-1 / 3) * ((1 - part) / 8 + part), theta ** (-2 / 3) / 8]
    assert cos[0, 0, :3].tolist() == pytest.approx([math.cos(frequency) for frequency in frequencies], rel=1e-6)
    assert torch.equal(
        rotation(torch.tensor([5]), 6, theta, RopeScaling())[0], rotation(torch.tensor([5]), 6, theta)[0]
    )


def test_zero_centred_norms_are_plain_ones_of_weights_one_more(rig, tiny_config, batch_of):
    """From the start, and for weights that bf16 would round beside 1."""
    plain, centred = rig(tiny_config()), rig(tiny_config("model.zero_centered_norms=true"))
    assert loss_of(plain, [batch_of(0, 20)], Phase.sparse) == loss_of(centred, [batch_of(0, 20)], Phase.sparse)
    norms = [name for name in plain.weights() if name.endswith("norm.weight")]
    assert len(norms) == 2 * 6 + 1 and not any(centred.weights()[name].any() for name in norms)
    with torch.no_grad():
        for name in norms:
            noise = 0.1 * torch.randn(plain.weights()[name].shape, generator=torch.Generator().manual_seed(len(name)))
            dict(plain.model.named_parameters())[name].add_(noise)
            dict(centred.model.named_parameters())[name].add_(noise)
    one, other = (loss_of(it, [batch_of(0, 20)], Phase.sparse) for it in (plain, centred))
    assert one == pytest.approx(other, rel=1e-6) and one != pytest.approx(3.69, abs=1e-4)
    weight = torch.tensor([1e-3], dtype=torch.bfloat16)
    norm = RMSNorm(type("Config", (), {"layernorm_zero_centered_gamma": True}), 1, 0.0)
    norm.weight.data = weight
    assert norm(torch.ones(1)).item() == pytest.approx(1 + weight.item(), rel=1e-6)


def test_qk_norms_follow_their_formulas(rig, tiny_config):
    hidden = torch.randn(5, 1, 24, generator=torch.Generator().manual_seed(1))
    for kind in ("per_head", "full_vector"):
        one = rig(tiny_config(f"model.qk_norm={kind}", "model.rotary_dim=0"))
        attention = one.model.decoder.layers[0].self_attention
        with torch.no_grad():
            attention.query_norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(2))
        context = type("Context", (), {"cos": torch.empty(5, 1, 0), "sin": torch.empty(5, 1, 0)})
        query, keys_and_values = attention._project(hidden, context)
        _, value = keys_and_values.wait()
        weight = attention.linear_qkv.weight.view(3, 4, 8, 24)  # per group: two query heads, key, value
        raw = torch.einsum("th,grdh->tgrd", hidden[:, 0], weight)
        expected = raw[:, :, :2].reshape(5, 6, 8)
        dims = (-1,) if kind == "per_head" else (-2, -1)
        scale = expected.square().mean(dim=dims, keepdim=True).add(1e-6).rsqrt()
        norm = attention.query_norm.weight.view(-1, 8) if kind == "full_vector" else attention.query_norm.weight
        torch.testing.assert_close(query, expected * scale * norm, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value, raw[:, :, 3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counts", [(3, 0, 4, 1), (0, 0, 8, 0), (0, 0, 0, 0)], ids=str)
def test_grouped_experts_equal_a_loop_over_experts(rig, tiny_config, counts):
    """Values and gradients, with empty experts and with no token at all (field cases 2.11, T2.5)."""
    one = rig(tiny_config("moe.num_experts=4"))
    experts = one.model.decoder.layers[1].mlp.experts
    assert isinstance(experts, GroupedExperts)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(counts), 24, generator=generator, requires_grad=True)
    probs = torch.rand(sum(counts), generator=generator, requires_grad=True)
    output, bias = experts(tokens, torch.tensor(counts), probs)
    assert bias is None
    gradients = torch.autograd.grad(output.square().sum(), [tokens, probs, *experts.parameters()])
    rows = []
    for expert, (part, weight) in enumerate(zip(tokens.split(counts), probs.split(counts), strict=True)):
        gate, up = (part @ experts.gate_up_proj[expert].flatten(0, 1).T).chunk(2, dim=-1)
        rows.append((F.silu(gate) * up * weight[:, None]) @ experts.down_proj[expert].T)
    expected = torch.cat(rows)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    expected_gradients = torch.autograd.grad(expected.square().sum(), [tokens, probs, *experts.parameters()])
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-7)


def test_one_expert_is_a_dense_mlp(rig, tiny_config):
    one = rig(tiny_config("moe.num_experts=1", "moe.top_k=1"))
    layer = one.model.decoder.layers[1].mlp
    hidden = torch.randn(7, 1, 24, generator=torch.Generator().manual_seed(0))
    output, _ = layer(hidden)
    gate, up = (hidden @ layer.experts.gate_up_proj[0].flatten(0, 1).T).chunk(2, dim=-1)
    torch.testing.assert_close(output, (F.silu(gate) * up) @ layer.experts.down_proj[0].T, rtol=1e-5, atol=1e-7)
