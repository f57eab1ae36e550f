import pickle

import pytest
import torch

from msa_pretrain.data.dataset import Sample
from msa_pretrain.data.packing import collate
from msa_pretrain.training.step import sampled_rows


def sample(tokens, lengths, documents, masked=()):
    loss_mask = torch.ones(len(tokens), dtype=torch.bool)
    loss_mask[list(masked)] = False
    tokens = torch.tensor(tokens)
    return Sample(tokens, tokens + 100, loss_mask, lengths, documents)


FIRST = sample([5, 0, 6, 7, 0, 8, 9, 10], (2, 3, 3), (40, 41, 42), masked=(1, 4))
SECOND = sample([1, 2, 3, 0, 4, 5, 6, 7], (4, 4), (42, 7), masked=(3,))


def test_one_sample():
    """T4.2, as the kernels see it."""
    batch = collate([FIRST])
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]
    assert batch.segments.rows == ((0, 2, 0, 2), (2, 3, 2, 3), (5, 3, 5, 3))
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1, 0, 1, 1, 1]]
    assert batch.num_target_tokens == 6 and batch.num_valid_rows == 8


def test_samples_follow_one_another_in_one_row():
    batch = collate([FIRST, SECOND])
    assert batch.tokens.tolist() == [[5, 0, 6, 7, 0, 8, 9, 10, 1, 2, 3, 0, 4, 5, 6, 7]]
    assert torch.equal(batch.labels, batch.tokens + 100)
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch.document_ids.tolist() == [40, 40, 41, 41, 41, 42, 42, 42, 42, 42, 42, 42, 7, 7, 7, 7]
    # Document 42 is in both samples; its parts are two segments all the same.
    assert [row[:2] for row in batch.segments.rows] == [(0, 2), (2, 3), (5, 3), (8, 4), (12, 4)]
    assert all(row[:2] == row[2:] for row in batch.segments.rows)
    assert batch.segments.num_queries == batch.segments.num_keys == 16
    assert batch.num_target_tokens == 13 and batch.num_valid_rows == 16
    dtypes = (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype, batch.positions.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.float32, torch.int64)
    assert batch.document_ids.dtype == torch.int64 and batch.tokens.is_contiguous()


def test_padding_is_in_no_segment():
    padded = Sample(torch.arange(6), torch.arange(6) + 1, torch.tensor([1, 0, 1, 0, 0, 0]) > 0, (2, 2), (5, 6))
    batch = collate([padded, FIRST, padded])
    assert [row[:2] for row in batch.segments.rows] == [(0, 2), (2, 2), (6, 2), (8, 3), (11, 3), (14, 2), (16, 2)]
    assert all(row[:2] == row[2:] for row in batch.segments.rows)
    inside = batch.segments.query_mask("cpu")
    assert inside.tolist() == [True] * 4 + [False] * 2 + [True] * 12 + [False] * 2
    assert batch.document_ids.tolist() == [5, 5, 6, 6, -1, -1, 40, 40, 41, 41, 41, 42, 42, 42, 5, 5, 6, 6, -1, -1]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 0]]
    assert batch.num_valid_rows == 16 and batch.num_target_tokens == 10 and batch.segments.num_queries == 20
    assert not (sampled_rows(batch, 2.0)[:, None] == (~inside).nonzero()[:, 0]).any()
    assert len(sampled_rows(batch, 2.0)) == 16


def test_a_batch_survives_a_worker_and_a_move():
    batch = collate([FIRST, SECOND])
    for copy in (pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        assert copy.segments == batch.segments and torch.equal(copy.positions, batch.positions)
        assert copy.num_target_tokens == 13
    meta = batch.to("meta")
    moved = (meta.tokens, meta.labels, meta.loss_mask, meta.positions, meta.document_ids)
    assert {tensor.device.type for tensor in moved} == {"meta"}


def test_no_samples():
    with pytest.raises(ValueError, match="there are no samples to pack"):
        collate([])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shares_of_context_ranks_are_the_batch(size):
    """Each row once, with its position, its keys and its targets; keys are those of the whole batch."""
    lengths = [1, 3, 7, 24, 13]  # 48 tokens
    tokens = torch.arange(48)
    mask = torch.arange(48) % 3 > 0
    whole = collate([Sample(tokens, tokens + 1, mask, tuple(lengths), tuple(range(5)))])
    shares = [whole.share(rank, size) for rank in range(size)]
    sees = {}
    for share in shares:
        assert share.segments.num_queries == share.tokens.numel() == 48 // size and share.segments.num_keys == 48
        assert torch.equal(share.segments.positions("cpu"), share.positions[0])
        assert torch.equal(share.labels, share.tokens + 1)
        for q_start, q_len, k_start, k_len in share.segments.rows:
            for number in range(q_len):
                token = int(share.tokens[0, q_start + number])
                sees[token] = (k_start, k_start + k_len - q_len + number)
    starts = torch.repeat_interleave(torch.tensor(lengths).cumsum(0) - torch.tensor(lengths), torch.tensor(lengths))
    assert sees == {token: (int(starts[token]), token) for token in range(48)}
    assert sum(share.num_valid_rows for share in shares) == 48
    assert sum(share.num_target_tokens for share in shares) == whole.num_target_tokens == 32
    # the ranks' work is within a chunk of even: one long document, pairs of chunks from both ends
    long = collate([Sample(tokens, tokens + 1, mask, (48,), (0,))])
    work = [int((long.share(rank, size).positions + 1).sum()) for rank in range(size)]
    assert len(set(work)) == 1


def test_a_batch_that_does_not_split_is_refused():
    batch = collate([Sample(torch.arange(10), torch.arange(10), torch.ones(10, dtype=torch.bool), (10,), (0,))])
    with pytest.raises(ValueError, match="10 tokens do not split into 2 x 2 chunks"):
        batch.share(0, 2)
