"""The indexed files themselves: Megatron reads them, and damage of any kind is an error and never a wrong token."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_pretrain.data.combine import verify
from msa_pretrain.data.indexed import (
    CHECKSUM_BLOCK_BYTES,
    FILES,
    bin_path,
    crc_path,
    idx_path,
    manifest_path,
    open_indexed_dataset,
)
from msa_pretrain.data.writer import write_indexed_dataset


def documents_of(seed, number=60, vocab_size=300):
    random = np.random.default_rng(seed)
    return [random.integers(1, vocab_size, random.integers(1, 900)).tolist() for _ in range(number)]


def write(prefix, documents, vocab_size=300):
    return write_indexed_dataset(
        ((str(n), d) for n, d in enumerate(documents)), prefix, vocab_size=vocab_size, eod_id=0
    )


@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_the_files_are_those_of_megatrons_own_builder(tmp_path, vocab_size):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Megatrons

    documents = documents_of(0, vocab_size=vocab_size)
    write(tmp_path / "ours", documents, vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(np.array([*document, 0]), [len(document) + 1])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    theirs, (ours, _) = Megatrons(str(tmp_path / "ours")), open_indexed_dataset(tmp_path / "ours")
    assert all(np.array_equal(theirs[n], ours[n]) for n in range(len(documents)))


def test_parts_of_documents(tmp_path):
    documents = documents_of(1)
    write(tmp_path / "a", documents)
    dataset, _ = open_indexed_dataset(tmp_path / "a")
    for number, document in enumerate(documents):
        whole = [*document, 0]
        for offset, length in ((0, None), (0, 0), (len(whole), 0), (len(whole) // 2, 1), (1, None)):
            end = None if length is None else offset + length
            assert dataset.get(number, offset, length).tolist() == whole[offset:end]
        for offset, length in ((-1, 1), (0, len(whole) + 1), (len(whole), 1), (0, -1)):
            with pytest.raises(IndexError, match=rf"document {number} has {len(whole)} tokens, not"):
                dataset.get(number, offset, length)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Two datasets of the same shape and other tokens, and the documents of the first."""
    folder, documents = tmp_path_factory.mktemp("healthy"), documents_of(2)
    write(folder / "a", documents)
    write(folder / "b", [[1 + token % 299 for token in document] for document in documents])
    return folder, [[*document, 0] for document in documents]


def read_or_refuse(prefix: Path, documents) -> bool:
    """Whether any read was refused; every document that is given out is right."""
    try:
        dataset, manifest = open_indexed_dataset(prefix)
        assert manifest.num_documents == len(documents)
    except ValueError as err:
        assert len(str(err)) > 40 and str(prefix.parent) in str(err)
        return True
    refused = False
    for number, document in enumerate(documents):
        try:
            assert dataset[number].tolist() == document
        except ValueError as err:
            assert "damaged" in str(err) or "truncated" in str(err)
            refused = True
    return refused


@st.composite
def damages(draw):
    """(file, what happens to it): cut, lengthened, bytes changed, zeroed or swapped."""
    path = draw(st.sampled_from(FILES))
    kind = draw(st.sampled_from(["cut", "longer", "bytes", "hole", "garbage"]))
    return path, kind, draw(st.floats(0, 1, exclude_max=True)), draw(st.binary(min_size=1, max_size=40))


@pytest.mark.parametrize("text", ["11111111", "null", '["a"]', '"a"'])
def test_json_that_is_no_object_is_no_manifest(healthy, tmp_path, text):
    for path in FILES:
        shutil.copy(path(healthy[0] / "a"), path(tmp_path / "a"))
    manifest_path(tmp_path / "a").write_text(text)
    with pytest.raises(ValueError, match="is not a manifest: it holds"):
        open_indexed_dataset(tmp_path / "a")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=damages())
def test_damage_is_refused_and_never_a_wrong_token(healthy, tmp_path_factory, damage):
    folder, documents = healthy
    copy = tmp_path_factory.mktemp("damaged")
    for path in FILES:
        shutil.copy(path(folder / "a"), path(copy / "a"))
    path, kind, where, noise = damage
    file = path(copy / "a")
    before = file.read_bytes()
    at = int(where * len(before))
    after = {
        "cut": before[:at],
        "longer": before + noise,
        "bytes": before[:at] + noise + before[at + len(noise) :],
        "hole": before[:at] + bytes(len(before[at : at + 4096])) + before[at + 4096 :],
        "garbage": noise * 8,
    }[kind]
    file.write_bytes(after)
    changed = after != before
    if path is manifest_path and changed:
        # a changed word that no token depends on may pass
        read_or_refuse(copy / "a", documents)
    else:
        assert read_or_refuse(copy / "a", documents) == changed
    shutil.rmtree(copy)


@pytest.mark.parametrize("swapped", [[path] for path in FILES] + [[bin_path, crc_path], [bin_path, crc_path, idx_path]])
def test_files_of_another_dataset_of_the_same_shape_are_refused(healthy, tmp_path, swapped):
    """Equal sizes and lengths: only the tokens differ. (The index and the manifest of equal lengths may be equal.)"""
    folder, documents = healthy
    for path in FILES:
        shutil.copy(path(folder / ("b" if path in swapped else "a")), path(tmp_path / "a"))
    assert read_or_refuse(tmp_path / "a", documents) == (swapped != [idx_path])


def test_one_changed_byte_spoils_its_block_alone(tmp_path):
    documents = documents_of(3, number=200)
    write(tmp_path / "a", documents)
    data = bytearray(bin_path(tmp_path / "a").read_bytes())
    data[2 * CHECKSUM_BLOCK_BYTES + 5] ^= 1
    bin_path(tmp_path / "a").write_bytes(data)
    dataset, _ = open_indexed_dataset(tmp_path / "a")
    assert dataset[0].tolist() == [*documents[0], 0] and dataset[199].tolist() == [*documents[199], 0]
    with pytest.raises(ValueError, match=r"a\.bin is damaged: bytes 32768 to 49152 do not match their checksum"):
        dataset.read_tokens(0, 20_000)
    with pytest.raises(ValueError, match=r"bytes 32768 to 49152"):
        verify(tmp_path / "a")


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    write(tmp_path / "a", documents_of(4))
    dataset, manifest = open_indexed_dataset(tmp_path / "a")
    with open(bin_path(tmp_path / "a"), "r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match=r"a\.bin (was truncated while it was in use|is damaged)"):
        dataset[manifest.num_documents - 1]


def test_verify_recomputes_the_manifest(tmp_path):
    documents = [[5, 5, 5, 0, 7], [8], [9] * 300]
    write(tmp_path / "a", documents, vocab_size=20)
    manifest = verify(tmp_path / "a")
    assert (manifest.num_inner_eods, manifest.num_unused_ids, manifest.num_rare_ids) == (1, 15, 4)
    assert manifest.most_frequent_ids == [[9, 300], [0, 4], [5, 3], [7, 1], [8, 1]]
    assert manifest.document_lengths == [0, 1, 1, 0, 0, 0, 0, 0, 1] and manifest.longest_document == 301
    fields = json.loads(manifest_path(tmp_path / "a").read_text())
    manifest_path(tmp_path / "a").write_text(json.dumps(fields | {"num_rare_ids": 9, "longest_document": 3}))
    with pytest.raises(ValueError, match="the manifest's longest_document, num_rare_ids do not fit the files"):
        verify(tmp_path / "a")
