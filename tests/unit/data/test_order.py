"""Properties of the orders: every token once, borders exact, and nothing depends on the length of the run."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_pretrain.data import order as orders
from msa_pretrain.data.best_fit import best_fit_order
from msa_pretrain.data.order import Stage, blend_order, concat_order, samples_of, source_names

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40).map(lambda values: np.array(values, dtype=np.int32))
FEW = settings(max_examples=60, deadline=None)


def cut(lengths, order, row, seq_length):
    """[(document, offset, length)] of a sample with its last label, from the index."""
    (first, start), (last, end) = order.starts[row].tolist(), order.starts[row + 1].tolist()
    parts = []
    for position in range(first, last + 1):
        document = int(order.documents[position])
        begin = start if position == first else 0
        stop = end + 1 if position == last else int(lengths[document])
        parts.append((document, begin, stop - begin))
    assert sum(length for _, _, length in parts) == seq_length + 1
    return parts


@FEW
@given(lengths, st.integers(1, 30), st.integers(0, 3), st.integers(1, 4))
def test_concat_reads_every_token_once_an_epoch(lengths, seq_length, seed, epochs):
    num_tokens = int(lengths.sum())
    num_samples = samples_of(num_tokens * epochs, seq_length)
    if num_samples < 1 or num_tokens <= seq_length:
        return
    order = concat_order(lengths, num_samples=num_samples, seq_length=seq_length, seed=seed)
    assert sorted(order.shuffle.tolist()) == list(range(len(order.shuffle))) and len(order.shuffle) >= num_samples
    # end to end: each text row begins with the token that ended the one before as its last label
    inputs = [part for row in range(num_samples) for part in cut(lengths, order, row, seq_length)]
    stream = [(d, at) for d, offset, n in inputs for at in range(offset, offset + n)]
    stream = [token for row in range(num_samples) for token in stream[row * (seq_length + 1) :][:seq_length]]
    counts = Counter(stream)
    assert len(stream) == num_samples * seq_length
    assert max(counts.values()) == epochs
    missing = num_tokens * epochs - len(stream)
    assert (
        1 <= missing <= seq_length
        and sum(epochs - counts[d, at] for d in range(lengths.size) for at in range(lengths[d])) == missing
    )
    # documents of an epoch are a permutation
    for epoch in range(epochs):
        own = order.documents[epoch * lengths.size : (epoch + 1) * lengths.size]
        assert sorted(own.tolist()) == list(range(lengths.size))


@FEW
@given(lengths, st.integers(1, 30), st.integers(0, 3), st.integers(1, 60), st.integers(1, 200))
def test_a_longer_concat_run_begins_like_the_shorter_one(lengths, seq_length, seed, few, more):
    if lengths.sum() <= seq_length:
        return
    arguments = dict(seq_length=seq_length, seed=seed)
    short = concat_order(lengths, num_samples=few, **arguments)
    long = concat_order(lengths, num_samples=few + more, **arguments)
    for index in range(few):
        assert short.shuffle[index] == long.shuffle[index]
        row = int(short.shuffle[index])
        assert cut(lengths, short, row, seq_length) == cut(lengths, long, row, seq_length)


def test_megatron_orders_a_longer_run_anew():
    """Why its index is not used: with this, 40 samples of a run of 40 or of 140 would be other samples."""
    from megatron.core.datasets.gpt_dataset import _build_document_index

    def first_epoch(epochs):
        return _build_document_index(np.arange(50), epochs, np.random.RandomState(1), epochs > 1)[:50].tolist()

    assert first_epoch(1) == first_epoch(2) != first_epoch(3)


def test_one_epoch_is_ordered_as_megatron_orders_it():
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

    lengths = np.arange(1, 51, dtype=np.int32)
    order = concat_order(lengths, num_samples=10, seq_length=7, seed=3)
    random = np.random.RandomState(3)
    assert order.documents.tolist() == _build_document_index(np.arange(50), 1, random, False).tolist()
    total = samples_of(int(lengths.sum()), 7)
    assert order.shuffle.tolist() == _build_shuffle_index(total, total, random).tolist()


def packs_of(order):
    starts = order.starts.tolist()
    parts = list(zip(order.documents.tolist(), order.offsets.tolist(), order.lengths.tolist(), strict=True))
    return [parts[start:end] for start, end in pairwise(starts)]


@FEW
@given(lengths, st.integers(1, 60), st.integers(0, 3), st.booleans(), st.integers(1, 50), st.integers(1, 100))
def test_best_fit_packs_every_token_once(lengths, seq_length, seed, drop_long, buffer, num_samples):
    if drop_long and (lengths > seq_length).all():
        return
    arguments = dict(seq_length=seq_length, seed=seed, drop_long=drop_long, buffer_documents=buffer)
    order = best_fit_order(lengths, num_samples=num_samples, **arguments)
    packs = packs_of(order)
    assert len(packs) >= num_samples
    kept = [d for d in range(lengths.size) if not (drop_long and lengths[d] > seq_length)]
    tokens = Counter((d, at) for pack in packs for d, offset, n in pack for at in range(offset, offset + n))
    epochs = set(tokens.values())
    assert len(epochs) == 1 and set(tokens) == {(d, at) for d in kept for at in range(lengths[d])}
    assert order.num_dropped == epochs.pop() * (lengths.size - len(kept))
    for pack in packs:
        assert pack and sum(n for _, _, n in pack) <= seq_length and min(n for _, _, n in pack) >= 1
        for document, offset, n in pack:
            # whole, unless the document is longer than a pack; then in full packs and a rest
            assert offset % seq_length == 0 and n == min(seq_length, lengths[document] - offset)
    # a longer run begins with the same packs
    longer = packs_of(best_fit_order(lengths, num_samples=num_samples + 77, **arguments))
    assert longer[: len(packs)] == packs


def test_best_fit_takes_the_fullest_pack_with_room():
    lengths = np.array([6, 5, 4, 3, 2], dtype=np.int32)
    packs = packs_of(best_fit_order(lengths, num_samples=1, seq_length=10, seed=0, drop_long=False))
    assert sorted(sorted(n for _, _, n in pack) for pack in packs) == [[2, 3, 5], [4, 6]]


def test_best_fit_wastes_little():
    """Log-normal lengths, a mean of about 900 tokens, in packs of 8,192."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6, 1.2, 20_000), 2, 60_000).astype(np.int32)
    order = best_fit_order(lengths, num_samples=1, seq_length=8192, seed=0, drop_long=False)
    num_packs = len(order.starts) - 1
    assert 0 < 1 - lengths.sum() / (num_packs * 8192) < 0.001
    # next-fit, which documents in their own order would give, wastes far more
    room, naive = 0, 0
    for length in np.minimum(lengths, 8192):
        naive, room = (naive, room - length) if length <= room else (naive + 1, 8192 - length)
    assert naive > 1.05 * num_packs


def test_best_fit_without_a_document_that_fits():
    with pytest.raises(ValueError, match=r"every document is longer than seq_length \(8\) and .*long_documents=drop"):
        best_fit_order(np.array([9, 20], dtype=np.int32), num_samples=1, seq_length=8, seed=0, drop_long=True)


def test_best_fit_refuses_more_parts_than_it_can_number(monkeypatch):
    monkeypatch.setattr(orders, "MAX_DOCUMENT_INDEX", 30)
    with pytest.raises(ValueError, match=r"10 documents in 4 epochs exceed the limit of 30 document entries"):
        best_fit_order(np.full(10, 5, dtype=np.int32), num_samples=40, seq_length=8, seed=0, drop_long=False)


@st.composite
def stages(draw):
    names = [f"s{number}" for number in range(draw(st.integers(1, 6)))]
    starts = [0, *sorted(draw(st.sets(st.integers(1, 150), max_size=3)))]
    plan = []
    for start in starts:
        chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        weights = [draw(st.floats(0.001, 1)) for _ in chosen]
        plan.append(Stage(start, {name: weight / sum(weights) for name, weight in zip(chosen, weights, strict=True)}))
    return plan


@FEW
@given(stages(), st.integers(1, 300), st.integers(1, 300))
def test_blends_give_shares_at_any_time_and_go_on_in_each_source(plan, num_samples, more):
    source, sample = blend_order(plan, num_samples)
    names = source_names(plan)
    # each source gives its samples 0, 1, 2, ... over all stages: none twice, none left out
    for number in range(len(names)):
        assert sample[source == number].tolist() == list(range(int((source == number).sum())))
    for stage, end in zip(plan, [*(later.start for later in plan[1:]), num_samples], strict=True):
        own = source[stage.start : min(end, num_samples)]
        assert set(own.tolist()) <= {names.index(name) for name in stage.shares}
        for name, share in stage.shares.items():
            drawn = np.cumsum(own == names.index(name))
            assert (np.abs(drawn - share * np.arange(1, len(own) + 1)) < len(stage.shares)).all()
    longer = blend_order(plan, num_samples + more)
    assert np.array_equal(longer[0][:num_samples], source) and np.array_equal(longer[1][:num_samples], sample)
