import json
import subprocess
import sys

import numpy as np
import pytest

from msa_pretrain.data import corpus
from msa_pretrain.data.indexed import (
    FILES,
    bin_path,
    idx_path,
    manifest_path,
    open_indexed_dataset,
    read_manifest,
)
from msa_pretrain.data.prepare import prepare_builtin_corpus
from msa_pretrain.data.tokenizer import ByteTokenizer
from msa_pretrain.data.writer import write_indexed_dataset
from msa_pretrain.scripts import prepare_data


def named(*documents):
    return [(f"doc{number}", ids) for number, ids in enumerate(documents)]


def test_documents_come_back_with_one_eod_each(tmp_path):
    manifest = write_indexed_dataset(named([7, 8], [1], [256, 255, 3]), tmp_path / "a.b", vocab_size=257)
    dataset, again = open_indexed_dataset(tmp_path / "a.b")
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[7, 8, 256], [1, 256], [256, 255, 3, 256]]
    assert again == manifest
    assert (manifest.num_documents, manifest.num_tokens, manifest.longest_document) == (3, 9, 4)
    assert (manifest.dtype, manifest.vocab_size, manifest.eod_id, manifest.tokenizer) == ("uint16", 257, 256, "byte")
    assert manifest.num_bytes == bin_path(tmp_path / "a.b").stat().st_size == 18
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.bin", "a.b.crc", "a.b.idx", "a.b.json"]


def test_a_large_vocabulary_is_stored_in_int32(tmp_path):
    manifest = write_indexed_dataset(named([70000, 1]), tmp_path / "a", vocab_size=100_000, eod_id=0)
    dataset, _ = open_indexed_dataset(tmp_path / "a")
    assert manifest.dtype == "int32" and dataset[0].tolist() == [70000, 1, 0]


@pytest.mark.parametrize("bad", [70000, 257, -1])
def test_an_id_outside_the_vocabulary_names_its_document(tmp_path, bad):
    """T4.1: uint16 would store 70000 as 4464 and -1 as 65535."""
    documents = [("good.py", [1, 2]), ("bad.py", [bad, 1, 0])]
    with pytest.raises(ValueError, match=rf"document 'bad\.py' \(number 1\) holds token id {bad}, outside 0\.\.256"):
        write_indexed_dataset(documents, tmp_path / "a", vocab_size=257)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad, shape", [([[1, 2], [3, 4]], r"\(2, 2\), dtype int64"), ([1.5], r"\(1,\), dtype float64")]
)
def test_ids_that_are_no_flat_integers(tmp_path, bad, shape):
    with pytest.raises(
        ValueError, match=rf"document 'doc0' .* must be a flat list of integer token ids; got shape {shape}"
    ):
        write_indexed_dataset(named(bad), tmp_path / "a", vocab_size=257)


def test_empty_documents_are_skipped_and_counted(tmp_path):
    """T4.3."""
    documents = named([1, 2, 3], [], [4, 5, 6], np.array([], dtype=np.int64), [7, 8, 9])
    manifest = write_indexed_dataset(documents, tmp_path / "a", vocab_size=10, eod_id=0)
    dataset, _ = open_indexed_dataset(tmp_path / "a")
    assert (manifest.num_documents, manifest.num_empty_documents) == (3, 2)
    assert [dataset[i].tolist() for i in range(3)] == [[1, 2, 3, 0], [4, 5, 6, 0], [7, 8, 9, 0]]


def test_a_corpus_of_empty_documents_is_an_error(tmp_path):
    """T4.4."""
    with pytest.raises(ValueError, match=r"nothing to write at .*/a: of 2 documents, 2 are empty"):
        write_indexed_dataset(named([], []), tmp_path / "a", vocab_size=10, eod_id=0)
    with pytest.raises(ValueError, match=r"nothing to write at .*/a: of 0 documents, 0 are empty"):
        write_indexed_dataset([], tmp_path / "a", vocab_size=10, eod_id=0)
    assert list(tmp_path.iterdir()) == []


def test_eod_must_be_in_the_vocabulary(tmp_path):
    with pytest.raises(ValueError, match=r"eod_id \(256\) must lie in 0\.\.255"):
        write_indexed_dataset(named([1]), tmp_path / "a", vocab_size=256)


def test_a_failed_write_leaves_the_old_data_alone(tmp_path):
    before = write_indexed_dataset(named([1, 2]), tmp_path / "a", vocab_size=257)

    def broken():
        yield "one", [3]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        write_indexed_dataset(broken(), tmp_path / "a", vocab_size=257)
    assert open_indexed_dataset(tmp_path / "a")[1] == before
    assert len(list(tmp_path.iterdir())) == 4


def test_the_fingerprint_sees_tokens_and_borders(tmp_path):
    # The second has the first one's token stream (1 2 0 3 0) without its border.
    corpora = [named([1, 2], [3]), named([1, 2, 0, 3]), named([1, 2], [4]), named([1, 2], [3])]
    prints = [write_indexed_dataset(c, tmp_path / "a", vocab_size=9, eod_id=0).fingerprint for c in corpora]
    assert prints[0] == prints[3] and len(set(prints)) == 3


@pytest.mark.parametrize("path", FILES)
def test_a_missing_file_is_named_with_the_command_that_makes_it(tmp_path, path):
    write_indexed_dataset(named([1]), tmp_path / "a", vocab_size=257)
    path(tmp_path / "a").unlink()
    expected = rf"{path(tmp_path / 'a')} is missing.*scripts\.prepare_data \(--corpus builtin"
    with pytest.raises(ValueError, match=expected):
        open_indexed_dataset(tmp_path / "a")


def test_a_truncated_bin_is_refused_at_once(tmp_path):
    """T4.10: megatron-core opens it and fails at the first read behind the cut."""
    write_indexed_dataset(named([1] * 20, [2] * 20), tmp_path / "a", vocab_size=257)
    with open(bin_path(tmp_path / "a"), "r+b") as stream:
        stream.truncate(30)
    with pytest.raises(ValueError, match=r"a\.bin has 30 bytes, but 42 tokens of uint16 need 84"):
        open_indexed_dataset(tmp_path / "a")


def test_an_index_of_another_run_is_refused(tmp_path):
    write_indexed_dataset(named([1, 2], [3]), tmp_path / "a", vocab_size=257)
    write_indexed_dataset(named([1, 2, 3]), tmp_path / "b", vocab_size=257)
    idx_path(tmp_path / "b").replace(idx_path(tmp_path / "a"))
    expected = (
        r"a\.idx \(62 bytes\) says 1 documents of uint16 with 2 borders, but its manifest says 2 documents, 5 tokens"
    )
    with pytest.raises(ValueError, match=expected):
        open_indexed_dataset(tmp_path / "a")


def test_a_manifest_of_another_version_is_refused(tmp_path):
    write_indexed_dataset(named([1]), tmp_path / "a", vocab_size=257)
    fields = json.loads(manifest_path(tmp_path / "a").read_text())
    del fields["eod_id"]
    manifest_path(tmp_path / "a").write_text(json.dumps(fields | {"colour": "red"}))
    with pytest.raises(ValueError, match=r"not a manifest of this version: missing \['eod_id'\], unknown \['colour'\]"):
        read_manifest(tmp_path / "a")


@pytest.fixture
def small_library(monkeypatch, tmp_path):
    """A library of 200 files in place of the real one; file 0 is empty."""
    root = tmp_path / "lib"
    root.mkdir()
    for number in range(200):
        (root / f"m{number}.py").write_text("x" * number)
    monkeypatch.setattr(corpus, "stdlib_root", lambda: root)
    return root


def test_the_builtin_corpus_is_prepared_once(small_library, tmp_path, capsys):
    output = tmp_path / "out"
    prepare_data.main(["--corpus", "builtin", "--output", str(output)])
    first = capsys.readouterr().out
    manifests = {split: read_manifest(output / split) for split in ("train", "valid")}
    assert f"train: {manifests['train'].num_documents} documents" in first and "reused" not in first
    assert sum(m.num_documents + m.num_empty_documents for m in manifests.values()) == 200
    assert sum(m.num_empty_documents for m in manifests.values()) == 1
    assert sum(m.num_tokens for m in manifests.values()) == sum(number + 1 for number in range(1, 200))
    train, _ = open_indexed_dataset(output / "train")
    names = [f.name for f in corpus.list_corpus(root=small_library) if f.split == "train" and f.num_bytes]
    assert len(train[0]) == int(names[0][1:-3]) + 1 and train[0][-1] == 256
    assert ByteTokenizer().decode(train[0]) == (small_library / names[0]).read_text()

    written = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    prepare_data.main(["--corpus", "builtin", "--output", str(output)])
    assert capsys.readouterr().out.count(", reused\n") == 2
    assert written == {path: path.stat().st_mtime_ns for path in output.iterdir()}


def test_an_interrupted_preparation_is_done_again(small_library, tmp_path):
    prepare_builtin_corpus(tmp_path / "out")
    manifest_path(tmp_path / "out" / "valid").unlink()
    again = prepare_builtin_corpus(tmp_path / "out")
    assert [again[split][1] for split in ("train", "valid")] == [True, False]


def test_data_of_another_source_are_replaced_only_on_request(small_library, tmp_path):
    prepare_builtin_corpus(tmp_path / "out")
    with pytest.raises(
        SystemExit, match=r"prepare_data: .*/train already holds data of another source .* pass --overwrite"
    ):
        prepare_data.main(["--corpus", "builtin", "--output", str(tmp_path / "out"), "--max-bytes", "5000"])
    again = prepare_builtin_corpus(tmp_path / "out", max_bytes=5000, overwrite=True)
    assert sum(manifest.num_tokens for manifest, _ in again.values()) < 5200


def test_a_reused_preparation_needs_no_megatron():
    """Its import takes seconds, and every start of the main job asks whether the data are there."""
    code = f"import sys, {prepare_data.__name__}; assert not {{'megatron', 'torch'}} & set(sys.modules), 'slow import'"
    subprocess.run([sys.executable, "-c", code], check=True)
