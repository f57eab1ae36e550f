"""A source that goes on with another sequence length reads every token of its epochs once, whatever was read before."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_pretrain.data.best_fit import best_fit_order
from msa_pretrain.data.continuation import Start, concat_onward, merged, unread
from msa_pretrain.data.order import LongDocuments, Packing, concat_order

EMPTY = np.zeros((0, 3), dtype=np.int32)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=25).map(lambda values: np.array(values, dtype=np.int32))
FEW = settings(max_examples=80, deadline=None)


def tokens(parts):
    return Counter((d, at) for d, offset, n in parts for at in range(offset, offset + n))


def parts_of(order, rows):
    columns = (order.documents.tolist(), order.offsets.tolist(), order.lengths.tolist())
    everything, starts = list(zip(*columns, strict=True)), order.starts.tolist()
    return [part for row in rows for part in everything[starts[row] : starts[row + 1]]]


def inputs_of(order, rows, lengths):
    """Parts that samples of a ConcatOrder feed, their last label left out."""
    found = []
    for row in order.shuffle[rows].tolist():
        (first, start), (last, end) = order.starts[row].tolist(), order.starts[row + 1].tolist()
        for position in range(first, last + 1):
            document = int(order.documents[position])
            begin, stop = start if position == first else 0, end if position == last else int(lengths[document])
            found.append((document, begin, stop - begin))
    return found


@FEW
@given(lengths, st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=2, max_size=4), st.integers(0, 3))
@pytest.mark.parametrize("packing", ["concat", "split", "drop"])
def test_every_token_of_the_epochs_is_read_once(packing, lengths, stages, seed):
    """Two to four lengths, each for some samples: what is read, and what is left, make up whole epochs."""
    read, size, start, epochs = Counter(), 0, None, 0
    for stage, (growth, num_samples) in enumerate(stages):
        size += growth
        if lengths.sum() <= size or (packing == "drop" and (lengths > size).all()):
            return
        arguments = dict(num_samples=num_samples, seq_length=size, seed=seed)
        if packing != "concat":
            order = best_fit_order(lengths, drop_long=packing == "drop", start=start, **arguments)
            fed, epochs = parts_of(order, range(num_samples)), order.num_epochs
        elif start is None:
            order = concat_order(lengths, **arguments)
            fed, epochs = inputs_of(order, slice(num_samples), lengths), order.documents.size // lengths.size
        else:
            order = concat_onward(lengths, start, **arguments)
            fed, epochs = parts_of(order, range(num_samples)), order.num_epochs
            assert set(np.add.reduceat(order.lengths, order.starts[:-1]).tolist()) == {size}
        read += tokens(fed)
        left = unread(order, lengths, num_samples)
        assert (left[:, 2] > 0).all() and np.array_equal(merged(left), left)
        together = read + tokens(left.tolist())
        every = {(d, at) for d in range(lengths.size) for at in range(lengths[d])}
        if packing != "drop":
            assert set(together) == every and set(together.values()) == {epochs}
        else:
            # what was too long in the epochs before the last is gone
            assert set(together) <= every and max(together.values()) <= epochs
            assert all(together[d, at] == epochs for d, at in every if lengths[d] <= stages[0][0])
        start = Start(left, epochs, stage + 1)


@FEW
@given(lengths, st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(1, 40))
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_longer_run_begins_like_the_shorter_one(packing, lengths, size, growth, few, more):
    if lengths.sum() <= size + growth:
        return
    before = concat_order(lengths, num_samples=few, seq_length=size, seed=1)
    start = Start(unread(before, lengths, few), before.documents.size // lengths.size, 1)

    def onward(num_samples):
        arguments = dict(num_samples=num_samples, seq_length=size + growth, seed=1, start=start)
        if packing == "concat":
            order = concat_onward(lengths, **arguments)
        else:
            order = best_fit_order(lengths, drop_long=False, **arguments)
        return [parts_of(order, [row]) for row in range(num_samples)]

    assert onward(few + more)[:few] == onward(few)


def test_stretches_are_joined_and_put_in_order():
    parts = [[2, 0, 4], [1, 8, 4], [2, 4, 1], [1, 0, 4], [2, 6, 2]]
    assert merged(np.array(parts, dtype=np.int32)).tolist() == [[1, 0, 4], [1, 8, 4], [2, 0, 5], [2, 6, 2]]
    assert merged(EMPTY).tolist() == []


def test_a_long_document_of_which_nothing_was_read_stays_whole():
    """Cut into eighths before, it is one sample afterwards; a document that was begun gives the rest of itself."""
    lengths = np.array([64, 64, 64, 64], dtype=np.int32)
    before = best_fit_order(lengths, num_samples=3, seq_length=8, seed=0, drop_long=False)
    left = unread(before, lengths, 3)
    read = {(d, offset) for d, offset, _ in parts_of(before, range(3))}
    assert left[:, 2].sum() == 256 - 24 and len(read) == 3
    for document in range(4):
        if not any(d == document for d, _ in read):
            assert [document, 0, 64] in left.tolist()
    onward = best_fit_order(lengths, num_samples=1, seq_length=64, seed=0, drop_long=False, start=Start(left, 1, 1))
    assert [document for document in left.tolist() if document[2] == 64] != []
    packs = [parts_of(onward, [row]) for row in range(onward.starts.size - 1)]
    assert all([tuple(part)] in packs for part in left.tolist() if part[2] == 64)


@pytest.fixture
def growing(write, build, unique_documents):
    """Two sources, 8 tokens a sample, from sample 20 on 16, from sample 30 on 48; the blend changes at 10 and 30."""
    a, b = write("a", unique_documents), write("b", [[4000 + n] * (1 + n % 9) for n in range(40)])
    stages = [(0, {a: 0.7, b: 0.3}), (10, {a: 1.0}), (30, {a: 0.5, b: 0.5})]

    def built(num_samples=50, lengths=((0, 8), (20, 16), (30, 48)), **options):
        return build(*stages, num_samples=num_samples, seq_length=lengths, **options)

    return built


@pytest.mark.parametrize("packing", list(Packing))
def test_a_run_of_growing_samples(growing, unique_documents, packing):
    data = growing(packing=packing)
    assert [len(data[index].tokens) for index in range(50)] == [8] * 20 + [16] * 10 + [48] * 20
    assert [data.positions(n) for n in (0, 20, 21, 30, 50)] == [0, 160, 176, 320, 1280]
    a, b = data.manifests
    assert data.consumed(50) == {a: 37, b: 13} and data.consumed(50, 20) == {a: 20, b: 10}
    # every id of source a is unique: as long as its first epoch lasts, no token comes twice
    seen = Counter()
    for index in range(30):
        sample = data[index]
        assert sum(sample.segment_lengths) <= len(sample.tokens)
        fed = sample.tokens[: sum(sample.segment_lengths)].tolist()
        seen.update(token for token in fed if 0 < token < 4000)
    assert set(seen.values()) == {1} and sum(seen.values()) > 200
    # the label of a fed token is the next one of its document, or masked
    following = {x: y for doc in unique_documents for x, y in zip(doc, [*doc[1:], 0], strict=True)}
    for index in range(20, 50):
        sample = data[index]
        for token, label, kept in zip(sample.tokens.tolist(), sample.labels.tolist(), sample.loss_mask, strict=True):
            if kept and 0 < token < 4000:
                assert label == following[token]
            assert kept or token == 0
    uses = {use.prefix: use for use in data.uses()}
    assert uses[a].num_samples == 37 and data.uses(1)[1].num_samples == 0
    whole = sum(use.num_tokens for stage in range(3) for use in data.uses(stage))
    assert whole == sum(use.num_tokens for use in uses.values()) <= 1280
    assert uses[a].num_epochs == pytest.approx(sum(data.uses(stage)[0].num_epochs for stage in range(3)))


@pytest.mark.parametrize("options", [{}, {"packing": Packing.best_fit}], ids=["concat", "best_fit"])
def test_what_is_to_come_does_not_change_what_was(growing, options):
    whole = growing(**options)
    for changes in (
        {"lengths": ((0, 8), (20, 16), (30, 48), (45, 96)), "num_samples": 60},
        {"num_samples": 400},
        {"lengths": ((0, 8), (20, 16)), "num_samples": 30},
    ):
        other = growing(**changes, **options)
        for index in range(min(45, len(other))):
            assert other[index].tokens.equal(whole[index].tokens) and other[index].labels.equal(whole[index].labels)


def test_documents_that_were_too_long_come_when_they_fit(write, build):
    """Dropped at 8 tokens, read at 32 in the same epoch."""
    prefix = write("a", [[1] * 5, [2] * 20, [3] * 6, [4] * 7, [5] * 5, [6] * 60])
    options = {"packing": Packing.best_fit, "long_documents": LongDocuments.drop}
    data = build({prefix: 1.0}, num_samples=4, seq_length=[(0, 8), (2, 32)], **options)
    read = [{token for index in rows for token in data[index].tokens.tolist()} - {0} for rows in ((0, 1), (2, 3))]
    assert read[0] < {1, 3, 4, 5} and len(read[0]) == 2
    assert 2 in read[1] and 6 not in read[1] and read[0] | read[1] == {1, 2, 3, 4, 5}


def test_a_source_too_short_for_the_new_length_is_refused(write, build):
    prefix = write("a", [[1] * 30])
    with pytest.raises(ValueError, match=r"a holds 31 tokens, fewer than the 33 of one sample \(seq_length 32"):
        build({prefix: 1.0}, num_samples=9, seq_length=[(0, 8), (2, 32)])
