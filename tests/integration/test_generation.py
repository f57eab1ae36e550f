"""Greedy generation with the cache against full forward passes."""

import pytest
import torch

from msa_pretrain.kernels import Segments
from msa_pretrain.model.config import Phase
from msa_pretrain.model.context import AttentionContext
from msa_pretrain.model.generation import GenerationCache, generate

TRITON_SIZES = ["attention.block_size=16", "model.head_dim=16", "attention.index_dim=16", "model.rotary_dim=8"]
DEEPER = ["model.num_layers=3", "attention.full_layers=[1]", *TRITON_SIZES]
# Arithmetic of masked lanes, which the interpreter carries out and then drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@torch.no_grad()
def full_logits(rig, tokens, phase):
    segments = Segments.from_cu_seqlens([0, len(tokens)])
    device = next(rig.model.parameters()).device
    positions = torch.arange(len(tokens), device=device)
    context = AttentionContext.build(rig.spec, segments, positions, phase)
    rig.model.eval()
    return rig.model(torch.tensor([tokens], device=device), positions[None], None, packed_seq_params=context)[0]


def assert_greedy(rig, prompt, generated, phase):
    """Each token is the argmax of a full forward pass over what came before it."""
    logits = full_logits(rig, [*prompt, *generated], phase)
    expected = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert generated == expected
    best = logits[len(prompt) - 1 : -1].topk(2, dim=-1).values
    assert (best[:, 0] - best[:, 1]).min() > 0  # no tie decided it


def spread(rig):
    """Branches so large that the next token depends on all of the text; a fresh model repeats one token."""
    with torch.no_grad():
        for name, parameter in rig.model.named_parameters():
            if any(part in name for part in ("linear_proj", "experts", "mlp.linear")):
                parameter.mul_(30.0)
    return rig


@pytest.mark.parametrize("phase", [Phase.warmup, Phase.sparse], ids=lambda phase: phase.name)
def test_300_tokens_equal_the_full_forward(rig, tiny_config, phase):
    """Two prompts that end on either side of a block border (l = 4, k = 2); a layer with full attention among them."""
    overrides = ["model.num_layers=3", "attention.full_layers=[1]", "attention.init_blocks=1", "attention.top_k=3"]
    rig = spread(rig(tiny_config(*overrides)))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    generated = generate(rig.model, rig.spec, prompts, 300, phase=phase)
    assert len(set(generated[0])) > 5
    for prompt, tokens in zip(prompts, generated, strict=True):
        assert len(tokens) == 300
        assert_greedy(rig, prompt, tokens, phase)


def test_generation_in_triton(rig, tiny_config):
    """A few tokens across a block border in the interpreter; the GPU test makes all 300."""
    rig = spread(rig(tiny_config("attention.backend=triton", "attention.full_layers=[0]", *TRITON_SIZES)))
    prompts = [list(range(30)), list(range(20, 35))]
    generated = generate(rig.model, rig.spec, prompts, 4)
    for prompt, tokens in zip(prompts, generated, strict=True):
        assert_greedy(rig, prompt, tokens, Phase.sparse)


@pytest.mark.gpu
def test_300_tokens_in_triton(rig, tiny_config):
    rig = spread(rig(tiny_config("attention.backend=triton", *DEEPER)))
    prompts = [list(range(30)), list(range(20, 35))]
    generated = generate(rig.model, rig.spec, prompts, 300)
    for prompt, tokens in zip(prompts, generated, strict=True):
        assert len(set(tokens)) > 5
        assert_greedy(rig, prompt, tokens, Phase.sparse)


@pytest.mark.gpu
def test_300_tokens_in_bf16(rig, tiny_config):
    """A token that is not the argmax of the full forward is a near tie: two logits closer than bf16 moves logits.

    How far bf16 moves them (a block decided the other way at the cut included) is measured on the same weights in fp32.
    """
    low, high = (
        rig(tiny_config("attention.backend=triton", f"training.precision={precision}", *DEEPER))
        for precision in ("bf16", "fp32")
    )
    spread(low)
    with torch.no_grad():
        for ours, theirs in zip(high.model.parameters(), low.model.parameters(), strict=True):
            ours.copy_(theirs)
    prompts = [list(range(30)), list(range(20, 35))]
    for prompt, tokens in zip(prompts, generate(low.model, low.spec, prompts, 300), strict=True):
        assert len(set(tokens)) > 5
        rows = slice(len(prompt) - 1, -1)
        logits, exact = (full_logits(rig, [*prompt, *tokens], Phase.sparse)[rows].float() for rig in (low, high))
        gap = logits.amax(1) - logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        noise = (logits - exact).abs().amax()
        print(f"not the argmax: {(gap > 0).sum()} of 300, gap {gap.max():.2e}, bf16 noise {noise:.2e}")
        assert (gap <= 2 * noise).all() and (gap > 0).float().mean() < 0.1


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_prefill_in_pieces_changes_nothing(rig, tiny_config, chunk):
    rig = spread(rig(tiny_config()))
    prompts = [list(range(19)), [7], list(range(5, 17))]
    assert generate(rig.model, rig.spec, prompts, 12, prefill_chunk=chunk) == generate(rig.model, rig.spec, prompts, 12)


def test_bad_input_is_refused(rig, tiny_config):
    rig = rig(tiny_config())
    with pytest.raises(ValueError, match=r"prompts \[1\] are empty"):
        generate(rig.model, rig.spec, [[1], []], 2)
    cache = GenerationCache(num_sequences=1, capacity=4)
    cache.start_pass([3], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"sequence 0 grows to 5 tokens, past the capacity \(4\)"):
        cache.start_pass([2], torch.device("cpu"))
    with pytest.raises(ValueError, match="2 sequences given, but it holds 1"):
        cache.start_pass([1, 1], torch.device("cpu"))
