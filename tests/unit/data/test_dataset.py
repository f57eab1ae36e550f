import itertools
import multiprocessing
from collections import Counter
from pathlib import Path

import pytest
import torch

from msa_pretrain.data import order
from msa_pretrain.data.dataset import build_dataset
from msa_pretrain.data.indexed import read_manifest
from msa_pretrain.data.order import LongDocuments, Packing

EOD = 0


def segments_of(sample):
    """(document id, tokens, labels, loss mask) of each segment."""
    start = 0
    for document, length in zip(sample.document_ids, sample.segment_lengths, strict=True):
        part = slice(start, start + length)
        yield document, sample.tokens[part].tolist(), sample.labels[part].tolist(), sample.loss_mask[part].tolist()
        start += length
    assert start == sample.tokens.numel()


# Documents of 2, 3 and 4 tokens with their EOD: one sample of 8 tokens and its last label, in an order set by the seed.
T4_2_DOCUMENTS = [[5], [6, 7], [8, 9, 10]]


def sample_in_document_order(write, build):
    prefix = write("a", T4_2_DOCUMENTS)
    samples = (build({prefix: 1.0}, seed=seed)[0] for seed in range(100))
    return next(sample for sample in samples if sample.document_ids == (0, 1, 2))


def test_borders_come_from_document_lengths(write, build):
    """T4.2."""
    sample = sample_in_document_order(write, build)
    assert sample.tokens.tolist() == [5, 0, 6, 7, 0, 8, 9, 10]
    assert sample.labels.tolist() == [0, 6, 7, 0, 8, 9, 10, 0]
    assert sample.loss_mask.tolist() == [True, False, True, True, False, True, True, True]
    assert sample.segment_lengths == (2, 3, 3)
    assert sample.tokens.dtype == sample.labels.dtype == torch.int64


def test_an_eod_value_inside_a_document_is_no_border(write, build):
    prefix = write("a", [[EOD, 6, EOD, EOD, 7, EOD, 9, 1]])
    sample = build({prefix: 1.0})[0]
    assert sample.segment_lengths == (8,) and sample.document_ids == (0,)
    assert sample.loss_mask.all()


def test_a_sample_may_end_with_its_document(write, build):
    """The last label is the next document's first token: no segment of length 0, and the label is masked."""
    prefix = write("a", [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18]])  # 8 and 9 tokens with EOD
    by_document = {}
    for seed in range(20):
        for sample in build({prefix: 1.0}, seed=seed, num_samples=2):
            by_document[sample.document_ids] = sample
    sample = by_document[(0,)]
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, EOD]
    assert sample.labels[-1] == 11 and sample.loss_mask.tolist() == [True] * 7 + [False]
    assert sample.segment_lengths == (8,)


def test_a_sample_may_start_with_the_eod_of_a_cut_document(write, build):
    prefix = write("a", [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]])  # 9 tokens each with EOD
    samples = list(build({prefix: 1.0}, num_samples=2))
    second = next(sample for sample in samples if len(sample.segment_lengths) == 2)
    assert second.segment_lengths == (1, 7)
    assert second.tokens[0] == EOD and not second.loss_mask[0] and second.loss_mask[1:].all()


@pytest.mark.parametrize("seq_length", [1, 7, 8, 64])
def test_every_token_is_read_once_in_an_epoch(write, build, unique_documents, seq_length):
    prefix = write("a", unique_documents)
    num_tokens = sum(len(document) + 1 for document in unique_documents)
    num_samples = order.samples_of(num_tokens, seq_length)
    samples = list(build({prefix: 1.0}, num_samples=num_samples, seq_length=seq_length, seed=3))
    seen = Counter()
    for sample in samples:
        for document, tokens, labels, loss_mask in segments_of(sample):
            whole = [*unique_documents[document], EOD]
            start = len(whole) - 1 if tokens[0] == EOD else whole.index(tokens[0])
            assert tokens == whole[start : start + len(tokens)]
            seen.update((document, position) for position in range(start, start + len(tokens)))
            # The next token of the same document is a target; behind a document's EOD there is none.
            following = whole[start + 1 : start + 1 + len(tokens)]
            assert labels[: len(following)] == following
            assert loss_mask == [True] * len(following) + [False] * (len(tokens) - len(following))
    assert set(seen.values()) == {1}
    assert seen.total() == num_samples * seq_length
    assert 1 <= num_tokens - seen.total() <= seq_length  # the documented tail: the last label, and what fills no sample


def test_a_long_document_gives_all_its_samples(write, build):
    """T4.11: 10 s + 3 tokens, EOD included."""
    prefix = write("a", [list(range(1, 83))])
    assert order.samples_of(read_manifest(Path(prefix)).num_tokens, 8) == 10
    samples = list(build({prefix: 1.0}, num_samples=10))
    assert all(sample.segment_lengths == (8,) and sample.document_ids == (0,) for sample in samples)
    assert all(sample.loss_mask.all() for sample in samples)
    assert all(torch.equal(sample.labels, sample.tokens + 1) for sample in samples)
    assert sorted(itertools.chain.from_iterable(sample.tokens.tolist() for sample in samples)) == list(range(1, 81))


def test_a_small_source_is_read_again_in_another_order(write, build, unique_documents):
    prefix = write("a", unique_documents)  # 495 tokens, 61 samples of 8
    samples = list(build({prefix: 1.0}, num_samples=150))
    counts = Counter(token for sample in samples for token in sample.tokens.tolist() if token != EOD)
    assert set(counts.values()) == {2, 3}
    assert [s.tokens.tolist() for s in samples[:61]] != [s.tokens.tolist() for s in samples[61:122]]


def test_the_order_depends_on_the_seed_and_on_nothing_else(write, build, tmp_path, unique_documents):
    prefix = write("a", unique_documents)

    def order(**changes):
        return [sample.tokens.tolist() for sample in build({prefix: 1.0}, num_samples=61, **changes)]

    first = order(seed=1)
    assert order(seed=1) == first  # from the cache
    assert order(seed=1, cache_dir=tmp_path / "another") == first
    assert order(seed=2) != first and sorted(order(seed=2)) != sorted(first)  # documents are shuffled too
    assert len(list((tmp_path / "cache").iterdir())) == 3  # one blend, and one order of documents for each seed


def test_data_prepared_anew_do_not_meet_their_old_index(write, build):
    prefix = write("a", [[n] * 50 for n in range(1, 21)])
    assert len(list(build({prefix: 1.0}, num_samples=15))) == 15
    write("a", [list(range(100, 140))] * 3)  # same path, same arguments, 3 documents in place of 20
    samples = list(build({prefix: 1.0}, num_samples=15))
    assert {document for sample in samples for document in sample.document_ids} == {0, 1, 2}
    assert {token for sample in samples for token in sample.tokens.tolist()} == {EOD, *range(100, 140)}


def three_sources(write):
    """Sources of 20, 4 and 60 documents of 19 tokens; the ids tell the source."""
    return [write(name, [[key] * 19] * size) for name, key, size in (("a", 1, 20), ("b", 2, 4), ("c", 3, 60))]


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("shares", [(0.7, 0.3), (0.5, 0.25, 0.25), (0.01, 0.99)])
def test_weights_are_shares_of_samples(write, build, shares, scale):
    """T4.7's question in the field: 0.7/0.3 and 70/30 mean the same, whatever the sizes of the sources."""
    prefixes = three_sources(write)[: len(shares)]
    blend = {prefix: share * scale for prefix, share in zip(prefixes, shares, strict=True)}
    samples = list(build(blend, num_samples=100))
    sources = [int(sample.tokens.max()) - 1 for sample in samples]
    for num_drawn in (10, 50, 100):  # at any time, not only at the end
        counts = Counter(sources[:num_drawn])
        assert all(abs(counts[source] - share * num_drawn) <= 1 for source, share in enumerate(shares)), counts
    assert len(samples) == 100


def test_document_ids_are_unique_over_the_sources(write, build):
    a, b, _ = three_sources(write)
    samples = list(build({a: 1.0, b: 1.0}, num_samples=140))
    for sample in samples:
        first, last = (0, 20) if sample.tokens.max() == 1 else (20, 24)
        assert all(first <= document < last for document in sample.document_ids)
    assert {document for sample in samples for document in sample.document_ids} == set(range(24))


def test_uses_say_how_often_a_source_is_read(write, build):
    a, b, _ = three_sources(write)  # 400 and 80 tokens
    uses = build({a: 3.0, b: 1.0}, num_samples=80).uses()
    assert [(use.prefix, use.share, use.num_samples, use.num_tokens, use.num_epochs) for use in uses] == [
        (a, 0.75, 60, 480, 1.2),
        (b, 0.25, 20, 160, 2.0),
    ]
    assert all(use.padding == 0 and use.num_dropped == 0 for use in uses)


def _read_on_rank(rank, blend, cache_dir, store, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dataset = build_dataset([(0, blend)], num_samples=40, seq_length=8, seed=5, cache_dir=cache_dir)
    results.put((rank, [(sample.tokens.tolist(), sample.document_ids) for sample in dataset]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("num_sources", [1, 2])
def test_two_ranks_read_what_one_process_reads(write, build, tmp_path, unique_documents, num_sources):
    prefixes = [write("a", unique_documents), write("b", [[4000 + n] * 9 for n in range(20)])]
    blend = dict(zip(prefixes[:num_sources], (0.6, 0.4), strict=False))
    context = multiprocessing.get_context("fork")  # spares the children the import
    results = context.SimpleQueue()
    arguments = (blend, tmp_path / "shared_cache", tmp_path / "store", results)
    ranks = [context.Process(target=_read_on_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=60)
    assert [process.exitcode for process in ranks] == [0, 0]
    seen = dict(results.get() for _ in ranks)
    alone = [(s.tokens.tolist(), s.document_ids) for s in build(blend, num_samples=40, seed=5)]
    assert seen == {0: alone, 1: alone}


def test_a_longer_run_begins_like_the_shorter_one(write, build, unique_documents):
    """T4.5's question in the field: 40 samples of a run of 40 and of a run of 300, over many epochs."""
    blend = {write("a", unique_documents): 0.7, write("b", [[4000 + n] * 9 for n in range(20)]): 0.3}
    for packing in Packing:
        short, long = (list(build(blend, num_samples=n, packing=packing)) for n in (40, 300))
        assert [s.tokens.tolist() for s in short] == [s.tokens.tolist() for s in long[:40]]


def test_a_schedule_of_blends_goes_on_in_each_source(write, build):
    a, b, c = three_sources(write)
    whole = build((0, {a: 1.0, b: 1.0}), (40, {b: 1.0, c: 3.0}), (60, {a: 1.0}), num_samples=100)
    assert whole.consumed(40) == {a: 20, b: 20, c: 0}
    assert whole.consumed(60) == {a: 20, b: 25, c: 15} and whole.consumed(100) == {a: 60, b: 25, c: 15}
    for number, prefix in enumerate((a, b, c)):
        own = [s for s in whole if int(s.tokens.max()) == number + 1]
        alone = build({prefix: 1.0}, num_samples=len(own))
        assert [s.tokens.tolist() for s in own] == [s.tokens.tolist() for s in alone]


def test_best_fit_samples(write, build):
    """Documents of 3, 5, 4 and 11 tokens in samples of 8: whole ones side by side, the longest cut, and padding."""
    documents = [[1, 2], [11, 12, 13, 14], [21, 22, 23], list(range(31, 41))]
    dataset = build({write("a", documents): 1.0}, num_samples=3, packing=Packing.best_fit)
    samples = {sample.document_ids: sample for sample in dataset}
    assert sorted(samples) == [(1, 0), (2, 3), (3,)] or sorted(samples) == [(1, 3), (2, 0), (3,)]
    first = samples[(3,)]  # tokens 0 to 7 of the long document: the last label is its ninth token
    assert first.tokens.tolist() == list(range(31, 39)) and first.labels.tolist() == list(range(32, 40))
    assert first.loss_mask.all() and first.segment_lengths == (8,)
    assert dataset.uses()[0].padding == pytest.approx(1 / 24) and dataset.uses()[0].num_epochs == 1.0
    for ids, sample in samples.items():
        if ids == (3,):
            continue
        start = 0
        for document, length in zip(ids, sample.segment_lengths, strict=True):
            whole = [*documents[document], EOD][-length:]
            assert sample.tokens[start : start + length].tolist() == whole
            assert sample.labels[start : start + length - 1].tolist() == whole[1:]
            assert sample.loss_mask[start : start + length].tolist() == [True] * (length - 1) + [False]
            start += length
        assert sample.tokens[start:].tolist() == [EOD] * (8 - start) and not sample.loss_mask[start:].any()


def test_best_fit_may_leave_long_documents_out(write, build):
    prefix = write("a", [[1, 2], list(range(31, 41)), [5, 6, 7]])
    options = {"packing": Packing.best_fit, "long_documents": LongDocuments.drop}
    dataset = build({prefix: 1.0}, num_samples=2, **options)
    assert [sorted(sample.document_ids) for sample in dataset] == [[0, 2]] * 2
    assert dataset.uses()[0].num_dropped == 2 and dataset.uses()[0].num_epochs == 2.0


def test_a_corpus_shorter_than_one_sample_is_refused(write, build):
    """T4.9: megatron-core would repeat the 3 tokens all over the sample."""
    prefix = write("a", [[1, 2]])
    with pytest.raises(ValueError, match=r"a holds 3 tokens, fewer than the 65 of one sample \(seq_length 64"):
        build({prefix: 1.0}, seq_length=64)
    with pytest.raises(ValueError, match="holds 3 tokens, fewer than the 4"):
        build({prefix: 1.0}, seq_length=3)
    assert build({prefix: 1.0}, seq_length=2)[0].tokens.tolist() == [1, 2]


def test_the_sources_of_a_blend_share_one_tokenizer(write, build):
    a, b = write("a", [[1] * 20], vocab_size=300), write("b", [[1] * 20], vocab_size=400)
    with pytest.raises(
        ValueError, match=r"one tokenizer must .* \('t', '\w+', 300, 0\) in .*/a and \('t', '\w+', 400, 0\) in .*/b"
    ):
        build({a: 1.0, b: 1.0})
    c = write("c", [[1] * 20], vocab_size=300, tokenizer="u")
    with pytest.raises(ValueError, match=r"\('t', '\w+', 300, 0\) in .*/a and \('u', '\w+', 300, 0\) in .*/c"):
        build({a: 1.0, c: 1.0})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_must_be_positive(write, build, weight):
    with pytest.raises(ValueError, match=rf"the weight of .*/a is {weight}\. Weights must be positive"):
        build({write("a", [[1] * 20]): weight})


def test_other_arguments(write, build, tmp_path):
    prefix = write("a", [[1] * 20])
    with pytest.raises(ValueError, match="the blend is empty"):
        build({})
    for stages in ([(4, {prefix: 1.0})], [(0, {prefix: 1.0}), (0, {prefix: 1.0})], []):
        with pytest.raises(ValueError, match=r"must begin at growing samples, the first at 0; they begin at \["):
            build(*stages)
    for wrong in ({"num_samples": 0}, {"seq_length": 0}):
        with pytest.raises(ValueError, match=r"num_samples \(\d\) and seq_length \(\d\) must be at least 1"):
            build({prefix: 1.0}, **wrong)
    with pytest.raises(ValueError, match=r"absent\.bin is missing"):
        build({str(tmp_path / "absent"): 1.0})


def test_more_document_entries_than_int32_counts_are_refused(write, build, monkeypatch):
    prefix = write("a", [[1, 2, 3]] * 10)  # 40 tokens
    monkeypatch.setattr(order, "MAX_DOCUMENT_INDEX", 100)
    build({prefix: 1.0}, num_samples=49)
    with pytest.raises(ValueError, match=r"10 documents in 11 epochs exceed the limit of 100"):
        build({prefix: 1.0}, num_samples=50)


def test_a_wheel_without_the_compiled_helper_is_reported(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    order.compiled_helpers()
    monkeypatch.setattr(order.importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"compiled dataset helper .* does not load: No module named .*helpers"):
        order.compiled_helpers()
