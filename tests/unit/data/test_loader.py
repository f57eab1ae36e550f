import itertools
import os
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_pretrain.data.loader import DataExhaustedError, TrainingStream, batch_indices, evaluation_batches
from msa_pretrain.data.order import Packing


@pytest.fixture
def dataset(write, build, unique_documents):
    """40 samples of 8 tokens."""
    return build({write("a", unique_documents): 1.0}, num_samples=40)


def stream(dataset, consumed_samples=0, *, dp_rank=0, dp_size=1, micro_batch_size=2, **changes):
    arguments = {"global_batch_size": 4, "micro_batch_size": micro_batch_size, **changes}
    return TrainingStream(dataset, consumed_samples=consumed_samples, dp_rank=dp_rank, dp_size=dp_size, **arguments)


def rows(batches):
    """The samples of some micro-batches, in order."""
    return [row for batch in batches for row in batch.tokens.reshape(-1, 8).tolist()]


def expected_rows(dataset, indices):
    return [dataset[index].tokens.tolist() for index in indices]


def test_micro_batches_of_a_rank():
    layout = {"global_batch_size": 8, "micro_batch_size": 2, "dp_size": 2}
    assert batch_indices(0, dp_rank=0, **layout) == [[0, 1], [4, 5]]
    assert batch_indices(0, dp_rank=1, **layout) == [[2, 3], [6, 7]]
    assert batch_indices(24, dp_rank=1, **layout) == [[26, 27], [30, 31]]


@pytest.mark.parametrize("dp_size, micro_batch_size", [(1, 1), (1, 24), (2, 3), (4, 2), (8, 1), (24, 1)])
def test_the_global_batch_does_not_depend_on_the_layout(dp_size, micro_batch_size):
    layout = {"global_batch_size": 24, "micro_batch_size": micro_batch_size, "dp_size": dp_size}
    ranks = [batch_indices(48, dp_rank=rank, **layout) for rank in range(dp_size)]
    in_order = [index for micro_batches in zip(*ranks, strict=True) for index in itertools.chain(*micro_batches)]
    assert in_order == list(range(48, 72))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_resumes_repeat_and_skip_nothing(write, build, unique_documents, num_workers):
    """T4.5: stop at 12 of 40, resume, stop at 20, resume. Each resume opens the data anew."""
    blend = {write("a", unique_documents): 1.0}
    seen = []
    for start, stop in ((0, 12), (12, 20), (20, 40)):
        with stream(build(blend, num_samples=40), start, num_workers=num_workers) as resumed:
            while resumed.consumed_samples < stop:
                seen += rows(resumed.next_step())
            assert resumed.consumed_samples == stop
    assert seen == expected_rows(build(blend, num_samples=40), range(40))
    assert len({tuple(row) for row in seen}) == 40


def test_a_change_of_the_data_parallel_size_keeps_the_global_order(dataset):
    """T4.6: 16 samples on 2 ranks, the rest on 4."""

    def steps(consumed, dp_size, num_steps):
        ranks = [
            stream(dataset, consumed, dp_rank=rank, dp_size=dp_size, micro_batch_size=1, global_batch_size=8)
            for rank in range(dp_size)
        ]
        for _ in range(num_steps):
            micro_batches = zip(*(rank.next_step() for rank in ranks), strict=True)
            yield rows(itertools.chain.from_iterable(micro_batches))

    seen = [*steps(0, 2, 2), *steps(16, 4, 3)]
    assert seen == [expected_rows(dataset, range(start, start + 8)) for start in range(0, 40, 8)]


@st.composite
def interrupted_runs(draw):
    """Parts of a run: (steps, data-parallel size, micro-batch size, read-ahead workers are left out: they are slow)."""
    layouts = [(dp, micro) for dp in (1, 2, 4) for micro in (1, 2, 4, 8) if 8 % (dp * micro) == 0]
    return draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(layouts)), min_size=2, max_size=5))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(interrupted_runs(), st.booleans(), st.booleans(), st.sampled_from(list(Packing)))
def test_any_stops_and_layouts_give_the_same_global_order(blended, parts, ramp, growing, packing):
    """Acceptance: stop at random points, resume on 1, 2 or 4 ranks with another micro-batch, again and again."""
    lengths = [(0, 8), (40, 16), (64, 40)] if growing else 8

    def size_at(consumed):
        return 8 if not ramp or consumed >= 24 else 8 + 8 * (consumed // 16)

    seen, consumed = [], 0
    for steps, (dp_size, micro_batch_size) in parts:
        data = blended(packing, lengths)  # opened anew, as a resumed job does

        def micro_size_at(now, size=micro_batch_size):
            return 1 if growing and now >= 40 else size

        sizes = {"global_batch_size": size_at, "micro_batch_size": micro_size_at}
        ranks = [stream(data, consumed, dp_rank=r, dp_size=dp_size, **sizes) for r in range(dp_size)]
        for _ in range(steps):
            if consumed + size_at(consumed) > len(data):
                break
            micro_batches = zip(*(rank.next_step() for rank in ranks), strict=True)
            for batch in itertools.chain.from_iterable(micro_batches):
                seen += batch.tokens[0].tolist()
            consumed = ranks[0].consumed_samples
            assert {rank.consumed_samples for rank in ranks} == {consumed}
    expected = expected_rows(blended(packing, lengths), range(consumed))
    assert seen == list(itertools.chain.from_iterable(expected)) and consumed > 0


@pytest.fixture
def blended(write, build, unique_documents):
    """Three sources under a schedule of blends, opened anew at each call: 160 samples of 8 tokens."""
    a, b = write("a", unique_documents), write("b", [[4000 + n] * (1 + n % 9) for n in range(40)])
    stages = [(0, {a: 0.7, b: 0.3}), (30, {b: 1.0}), (50, {a: 0.2, b: 0.8})]
    return lambda packing, lengths: build(*stages, num_samples=160, packing=packing, seq_length=lengths)


def test_exhausted_data_are_one_clear_error_on_every_rank(dataset):
    for rank in range(2):
        with stream(dataset, 24, dp_rank=rank, dp_size=2, global_batch_size=12) as last:
            assert len(last.next_step()) == 3
            for _ in range(2):
                with pytest.raises(DataExhaustedError, match=r"36 of 40 samples are consumed .* next step needs 12"):
                    last.next_step()
            assert last.consumed_samples == 36


def test_workers_outlive_sigterm(dataset):
    with stream(dataset, num_workers=1) as training:
        seen = rows(training.next_step())
        (worker,) = training._batches._workers
        os.kill(worker.pid, signal.SIGTERM)
        while training.consumed_samples < 40:
            seen += rows(training.next_step())
        assert worker.is_alive()
    assert seen == expected_rows(dataset, range(40))
    worker.join(timeout=10)
    assert worker.exitcode == 0  # ended by the stream's close, not by the signal


def test_a_closed_stream(dataset):
    training = stream(dataset)
    training.close()
    with pytest.raises(ValueError, match="TrainingStream is closed"):
        training.next_step()


@pytest.mark.parametrize("dp_size, micro_batch_size", [(1, 1), (1, 4), (2, 2), (4, 3)])
def test_evaluation_reads_the_same_samples_in_any_layout(dataset, dp_size, micro_batch_size):
    ranks = [list(evaluation_batches(dataset, 12, micro_batch_size, rank, dp_size)) for rank in range(dp_size)]
    assert {len(batches) for batches in ranks} == {12 // (dp_size * micro_batch_size)}
    in_order = itertools.chain.from_iterable(zip(*ranks, strict=True))
    assert rows(in_order) == expected_rows(dataset, range(12))


def test_evaluation_is_refused_at_the_call_not_at_the_first_batch(dataset):
    with pytest.raises(ValueError, match="evaluation wants 44 samples, but the dataset holds 40"):
        evaluation_batches(dataset, 44, 1, 0, 1)
    expected = (
        r"the number of evaluation samples \(10\) must be a positive multiple of micro_batch_size \(2\) x .* \(2\)"
    )
    with pytest.raises(ValueError, match=expected):
        evaluation_batches(dataset, 10, 2, 0, 2)


def test_impossible_layouts(dataset):
    with pytest.raises(
        ValueError, match=r"global_batch_size \(4\) must be a positive multiple .* Use a multiple of 6\."
    ):
        stream(dataset, dp_size=3)
    with pytest.raises(ValueError, match=r"dp_rank \(2\) must lie in 0\.\.1"):
        stream(dataset, dp_rank=2, dp_size=2)
    with pytest.raises(ValueError, match=r"micro_batch_size \(0\) and dp_size \(1\) must be at least 1"):
        stream(dataset, micro_batch_size=0)
    with pytest.raises(ValueError, match=r"consumed_samples \(-4\) must not be negative"):
        stream(dataset, -4)
    with pytest.raises(ValueError, match=r"data\.num_workers \(-1\) must not be negative"):
        stream(dataset, num_workers=-1)
    with pytest.raises(ValueError, match=r"consumed_samples \(-1\) must not be negative"):
        batch_indices(-1, global_batch_size=4, micro_batch_size=2, dp_rank=0, dp_size=1)


def test_a_ramp_up_feeds_every_sample_once_and_resumes_in_the_middle(dataset):
    def size_at(consumed):
        return 2 if consumed < 6 else 4

    def ramp(consumed):
        return stream(dataset, consumed, global_batch_size=size_at, micro_batch_size=1)

    with ramp(0) as whole:
        steps = [rows(whole.next_step()) for _ in range(11)]
        assert whole.consumed_samples == 38
        with pytest.raises(DataExhaustedError, match=r"38 of 40 samples are consumed and the next step needs 4"):
            whole.next_step()
    assert [len(step) for step in steps] == [2, 2, 2] + [4] * 8
    assert [row for step in steps for row in step] == expected_rows(dataset, range(38))
    with ramp(4) as resumed:
        assert [rows(resumed.next_step()) for _ in range(4)] == steps[2:6]
