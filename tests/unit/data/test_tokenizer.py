import numpy as np
import pytest

from msa_pretrain.data.tokenizer import ByteTokenizer, load_tokenizer


def test_round_trip_of_text_and_of_every_byte():
    tokenizer = ByteTokenizer()
    text = "def f(x):\n\treturn 'naïve € 𝄞'\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    raw = bytes(range(256))
    assert tokenizer.encode(raw).tolist() == list(range(256))
    assert tokenizer.decode_bytes(tokenizer.encode(raw)) == raw
    assert tokenizer.encode("").size == 0


def test_eod_is_an_id_of_its_own():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.decode([104, 105, 256]) == "hi"
    assert dict(tokenizer.unique_identifiers) == {"name": "byte", "vocab_size": 257, "eod": 256}


def test_a_character_cut_at_a_border_is_replaced():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("a€")[:-1]) == "a\ufffd"


@pytest.mark.parametrize("bad", [257, -1])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(ValueError, match=rf"cannot decode id {bad}: its ids lie in 0\.\.256"):
        ByteTokenizer().decode(np.array([1, bad]))


def test_unknown_tokenizer():
    with pytest.raises(ValueError, match=r"data\.tokenizer is 'gpt2', but only 'byte' is supported"):
        load_tokenizer("gpt2")
