import itertools
import sys

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
    ids, lengths = tokenizer.encode_batch(["hi", "", "€"])
    assert ids.tolist() == [104, 105, 226, 130, 172] and lengths.tolist() == [2, 0, 3]


def test_a_character_cut_at_a_border_is_replaced():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("a€")[:-1]) == "a\ufffd"


@pytest.mark.parametrize("bad", [257, -1])
def test_ids_outside_the_vocabulary_are_refused(bad):
    with pytest.raises(ValueError, match=rf"cannot decode id {bad}: its ids lie in 0\.\.256"):
        ByteTokenizer().decode(np.array([1, bad]))


def trained(path, texts=("the quick brown fox", "über € 𝄞"), **options):
    """A small byte-level BPE tokenizer, saved as tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eod>", "<bos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    for name, value in options.items():
        getattr(tokenizer, name)(**value)
    tokenizer.save(str(path))
    return tokenizer


def test_a_tokenizer_json(tmp_path):
    raw = trained(tmp_path / "tokenizer.json", enable_truncation={"max_length": 3}, enable_padding={"length": 8})
    raw.no_truncation(), raw.no_padding()
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), "<eod>")
    texts = ["the quick brown fox jumps", "", "naïve <eod> 𝄞"]
    ids, lengths = tokenizer.encode_batch(texts)
    expected = [raw.encode(text, add_special_tokens=False).ids for text in texts]
    assert lengths.tolist() == [len(part) for part in expected] and ids.tolist() == list(itertools.chain(*expected))
    assert (tokenizer.eod, tokenizer.vocab_size) == (0, raw.get_vocab_size())
    same = load_tokenizer(str(tmp_path / "tokenizer.json"), "<eod>")
    other_eod = load_tokenizer(str(tmp_path / "tokenizer.json"), "<bos>")
    trained(tmp_path / "other.json", ("something else altogether",))
    other = load_tokenizer(str(tmp_path / "other.json"), "<eod>")
    assert tokenizer.sha256 == same.sha256 and len({t.sha256 for t in (tokenizer, other_eod, other)}) == 3


def test_a_folder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    raw = trained(tmp_path / "tokenizer.json")
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eod>", bos_token="<bos>").save_pretrained(
        tmp_path / "folder"
    )
    tokenizer = load_tokenizer(str(tmp_path / "folder"))
    text = "the quick brown € fox"
    assert tokenizer.encode_batch([text])[0].tolist() == raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.eod == 0 and load_tokenizer(str(tmp_path / "folder"), "<bos>").eod == 1


def test_the_end_of_a_document_must_be_named(tmp_path):
    trained(tmp_path / "tokenizer.json")
    path = str(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"does not say which token ends a document\. Name it with --eod-token"):
        load_tokenizer(path)
    with pytest.raises(ValueError, match=r"has no token '</s>' to end documents with. Name one of its tokens"):
        load_tokenizer(path, "</s>")
    with pytest.raises(ValueError, match=r"--eod-token \('<eod>'\) has no effect with --tokenizer byte"):
        load_tokenizer("byte", "<eod>")


def test_tokenizers_that_cannot_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"--tokenizer no/such-one: transformers cannot load it .* without a network"):
        load_tokenizer("no/such-one")
    with pytest.raises(ValueError, match=r"absent\.json does not exist"):
        load_tokenizer(str(tmp_path / "absent.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "bad.json"), "<eod>")


@pytest.mark.parametrize("name, module", [("some/name", "transformers"), ("some.json", "tokenizers")])
def test_a_missing_library_is_named_with_its_remedy(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"needs {module}, which is not there .* pip install 'msa-pretrain\[data\]'"):
        load_tokenizer(name)
