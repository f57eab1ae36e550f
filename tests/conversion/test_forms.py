"""How tensors are put together, position by position (field cases T6.1, T6.2, T6.3, T6.8), and FP8."""

import pytest
import torch

from msa_pretrain.model.hf import ConversionError
from msa_pretrain.model.hf.forms import EXPERT_GATE_UP, GATE_UP, NORM, QKV, VOCABULARY, Sizes
from msa_pretrain.training.conversion.quantized import dequantize

SIZES = Sizes(num_groups=2, head_dim=4, vocab_rows=8, vocab_size=5, norm_shift=1.0)


def heads(kind: int, count: int) -> torch.Tensor:
    """[count * 4, 1]: 100 * kind + 10 * head + channel."""
    return torch.tensor([[100 * kind + 10 * head + channel] for head in range(count) for channel in range(4)]).float()


def test_query_key_value_lie_group_by_group():
    """T6.1 and T6.2: 6 query heads in 2 groups; half of the rows, a rank's share under TP=2, is one whole group."""
    parts = [heads(1, 6), heads(2, 2), heads(3, 2)]
    joined = QKV.join(parts, SIZES)
    wanted = [[100, 110, 120, 200, 300], [130, 140, 150, 210, 310]]
    assert joined[::4, 0].view(2, 5).tolist() == wanted
    assert (joined.view(10, 4) - joined.view(10, 4)[:, :1]).tolist() == [[0, 1, 2, 3]] * 10
    assert joined.chunk(2)[1][::4, 0].tolist() == wanted[1]
    assert all(torch.equal(part, back) for part, back in zip(parts, QKV.split(joined, SIZES), strict=True))


@pytest.mark.parametrize("form", [GATE_UP, EXPERT_GATE_UP], ids=["one MLP", "an expert"])
def test_the_gate_comes_first_and_is_not_interleaved(form):
    gate, up = torch.zeros(3, 2), torch.ones(3, 2)
    joined = form.join([gate, up], SIZES)
    assert joined.shape == ((6, 2) if form is GATE_UP else (1, 2, 3, 2))
    assert joined.flatten().tolist() == [0] * 6 + [1] * 6
    assert [part.tolist() for part in form.split(joined, SIZES)] == [gate.tolist(), up.tolist()]


def test_padding_rows_are_zeros_and_cut_off_again():
    rows = torch.arange(1.0, 11).view(5, 2)
    padded = VOCABULARY.join([rows], SIZES)
    assert padded[5:].eq(0).all() and len(padded) == 8
    (back,) = VOCABULARY.split(padded.index_fill(0, torch.tensor([6]), 9.0), SIZES)
    assert torch.equal(back, rows)


def test_zero_centred_norms_of_the_other_side_have_one_less():
    weight = torch.tensor([-0.5, 0.0, 0.25])
    assert NORM.join([weight], SIZES).tolist() == [0.5, 1.0, 1.25]
    # every bf16 weight from 1/2 to 2 comes back to the bit
    plain = torch.arange(0x3F00, 0x4000, dtype=torch.int16).view(torch.bfloat16)
    assert plain[0] == 0.5 and plain[-1] < 2
    (theirs,) = NORM.split(plain, SIZES)
    assert torch.equal(NORM.join([theirs], SIZES), plain)


def test_fp8_tiles_at_the_ragged_edge():
    """T6.8: 200 x 130 weights in tiles of 128, scales 1, 2, 3, 4."""
    weight = torch.full((200, 130), 2.0).to(torch.float8_e4m3fn)
    values = dequantize("w", weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.bfloat16)
    assert values.dtype == torch.bfloat16
    for rows, columns, wanted in (
        (slice(0, 128), slice(0, 128), 2),
        (slice(0, 128), slice(128, 130), 4),
        (slice(128, 200), slice(0, 128), 6),
        (slice(128, 200), slice(128, 130), 8),
    ):
        assert values[rows, columns].eq(wanted).all()


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_mxfp8_scales_are_exponents(kind):
    """127 means 1; read as numbers they would be off by orders of magnitude. 150 rows go past a block of rows."""
    weight = torch.full((150, 40), 1.5).to(torch.float8_e4m3fn)
    exponents = torch.full((150, 2), 127, dtype=torch.uint8)
    exponents[140] = torch.tensor([130, 120])
    values = dequantize("w", weight, exponents.view(kind), torch.float32)
    assert values[:140].eq(1.5).all() and values[141:].eq(1.5).all()
    assert values[140, :32].eq(12).all() and values[140, 32:].eq(1.5 / 128).all()


def test_scales_of_an_unknown_form_are_refused():
    weight = torch.zeros(200, 130).to(torch.float8_e4m3fn)
    with pytest.raises(ConversionError, match=r"w \(200, 130\) has scales of torch\.float32 \(2, 3\); known are fp32"):
        dequantize("w", weight, torch.ones(2, 3), torch.float32)
