"""Triton kernels of block selection: check, score and pool, rank, and the lse over the kept tokens.

Worked example (BLOCK_SIZE 4, k=2, one group, a query at position 9): the dot products with keys 0..9 are pooled to
three block scores [5, 7, 1]. As 64-bit keys, high word the score (the local block 2 gets a word above every score), low
word the inverted id, they sort to 2, 1, 0. The first two are kept and stored by id: [1, 2].
"""

import triton
import triton.language as tl

from ..block_sparse_attention.kernel import find_item, load_block, load_rows, pair_rows

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# High words of 64-bit rank keys. Scores lie below: an fp32 that is no NaN has at most 0x7F800000 (infinity).
LOCAL_WORD = tl.constexpr(0x7FFFFFFF)
INIT_WORD = tl.constexpr(0x7FFFFFFE)
INFINITY_WORD = tl.constexpr(0x7F800000)
NOT_VISIBLE = tl.constexpr(-(2**63))
# A dot product of `i` terms up to this bound times i cannot overflow.
SAFE_PRODUCT = tl.constexpr(2.0**126)


@triton.jit
def _magnitude_word(x):
    """The bits of |x| in fp32: as integers they order like |x|, with infinity and NaN at the end."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _report_rows(words, row, report_ptr, magnitude_ptr):
    """Report a row (+ 1) that is not finite, and raise the magnitude to the largest word."""
    bad = tl.max(tl.where(words >= INFINITY_WORD, row + 1, 0), axis=0)
    if bad > 0:
        tl.store(report_ptr, bad)
    tl.atomic_max(magnitude_ptr, tl.max(words, axis=0))


@triton.jit
def _select_check_kernel(
    q_ptr, k_ptr, query_tiles_ptr, key_tiles_ptr, report_ptr, magnitudes_ptr,
    num_query_tiles, stride_qt, stride_qg, stride_qi, stride_kt, stride_ki,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr,
):  # fmt: skip
    """One program per (query tile, group), then one per key tile: rows that are not finite, and largest magnitudes.

    Every key of a fragment is visible to its last query, and every query sees a key, so a number that is not finite
    always makes a visible score that is not finite. Only integer maxima are atomic: the result has no order. Of several
    bad rows any one is reported.
    """
    pid = tl.program_id(0)
    offs_i = tl.arange(0, INDEX_DIM)
    if pid < num_query_tiles * NUM_GROUPS:
        query_tile = query_tiles_ptr + (pid // NUM_GROUPS).to(tl.int64) * 4
        group = (pid % NUM_GROUPS).to(tl.int64)
        offs_m = tl.arange(0, QUERY_ROWS)
        query_row = tl.load(query_tile) + offs_m
        mask_m = offs_m < tl.load(query_tile + 1)
        q_tile = tl.load(
            q_ptr + query_row[:, None] * stride_qt + group * stride_qg + offs_i * stride_qi,
            mask=mask_m[:, None], other=0.0,
        )  # fmt: skip
        _report_rows(tl.max(_magnitude_word(q_tile), axis=1), query_row, report_ptr, magnitudes_ptr)
    else:
        key_tile = key_tiles_ptr + (pid - num_query_tiles * NUM_GROUPS).to(tl.int64) * 6
        offs_n = tl.arange(0, KEY_ROWS)
        key_row = tl.load(key_tile) + offs_n
        mask_n = offs_n < tl.load(key_tile + 1)
        k_tile = tl.load(
            k_ptr + key_row[:, None] * stride_kt + offs_i[None, :] * stride_ki, mask=mask_n[:, None], other=0.0
        )
        _report_rows(tl.max(_magnitude_word(k_tile), axis=1), key_row, report_ptr + 1, magnitudes_ptr + 1)


@triton.jit
def _select_overflow_kernel(
    q_ptr, k_ptr, query_tiles_ptr, report_ptr, magnitudes_ptr,
    stride_qt, stride_qg, stride_qi, stride_kt, stride_ki,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (query tile, group): report visible dot products of finite inputs that overflow.

    Ends at once unless the largest magnitudes leave room for an overflow, which is the case in every healthy run.
    """
    q_largest = tl.load(magnitudes_ptr).to(tl.float32, bitcast=True)
    k_largest = tl.load(magnitudes_ptr + 1).to(tl.float32, bitcast=True)
    if not (q_largest * k_largest * INDEX_DIM < SAFE_PRODUCT):
        pid = tl.program_id(0)
        tile = query_tiles_ptr + (pid // NUM_GROUPS).to(tl.int64) * 4
        group = (pid % NUM_GROUPS).to(tl.int64)
        first = tl.load(tile)
        num_rows = tl.load(tile + 1)
        position = tl.load(tile + 2)
        key_first = tl.load(tile + 3)
        offs_m = tl.arange(0, BLOCK_M)
        offs_n = tl.arange(0, BLOCK_SIZE)
        offs_i = tl.arange(0, INDEX_DIM)
        mask_m = offs_m < num_rows
        row = first + offs_m
        q_tile = tl.load(
            q_ptr + row[:, None] * stride_qt + group * stride_qg + offs_i[None, :] * stride_qi,
            mask=mask_m[:, None], other=0.0,
        )  # fmt: skip
        num_keys = position + num_rows
        bad = tl.zeros((BLOCK_M,), dtype=tl.int64)
        for start in range(0, num_keys.to(tl.int32), BLOCK_SIZE):
            key_position = start + offs_n
            k_tile = tl.load(
                k_ptr + (key_first + key_position)[None, :] * stride_kt + offs_i[:, None] * stride_ki,
                mask=(key_position < num_keys)[None, :], other=0.0,
            )  # fmt: skip
            x = tl.dot(q_tile, k_tile, input_precision=PRECISION)
            visible = (key_position[None, :] <= (position + offs_m)[:, None]) & mask_m[:, None]
            wrong = visible & (_magnitude_word(x) >= INFINITY_WORD)
            bad = tl.maximum(bad, tl.max(tl.where(wrong, row[:, None] + 1, 0), axis=1))
        found = tl.max(bad, axis=0)
        if found > 0:
            tl.store(report_ptr + 2, found)


@triton.jit
def _block_scores_kernel(
    q_ptr, k_ptr, query_tiles_ptr, score_tiles_ptr, scores_ptr,
    first_tile, stride_qt, stride_qg, stride_qi, stride_kt, stride_ki,
    NUM_GROUPS: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (query tile, group): raw dot products by key block, of which only the maximum is stored.

    scores of a tile: [NUM_GROUPS, blocks, BLOCK_M] at its offset, so that the rows of one block are stored together.
    """
    pid = tl.program_id(0)
    number = (first_tile + pid // NUM_GROUPS).to(tl.int64)
    group = (pid % NUM_GROUPS).to(tl.int64)
    tile = query_tiles_ptr + number * 4
    first = tl.load(tile)
    num_rows = tl.load(tile + 1)
    position = tl.load(tile + 2)
    key_first = tl.load(tile + 3)
    offset = tl.load(score_tiles_ptr + number * 2)
    num_blocks = tl.load(score_tiles_ptr + number * 2 + 1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_SIZE)
    offs_i = tl.arange(0, INDEX_DIM)
    # [BLOCK_M, INDEX_DIM]; rows past the tile are zero and never looked at
    q_tile = tl.load(
        q_ptr + (first + offs_m)[:, None] * stride_qt + group * stride_qg + offs_i[None, :] * stride_qi,
        mask=(offs_m < num_rows)[:, None], other=0.0,
    )  # fmt: skip
    out_ptr = scores_ptr + offset + group * num_blocks * BLOCK_M + offs_m
    # Blocks whose last token the first row sees need no mask.
    num_full = ((position + 1) // BLOCK_SIZE).to(tl.int32)
    for block in tl.range(0, num_full, num_stages=STAGES):
        key_row = key_first + block * BLOCK_SIZE + offs_n
        # [INDEX_DIM, BLOCK_SIZE]
        k_tile = tl.load(k_ptr + key_row[None, :] * stride_kt + offs_i[:, None] * stride_ki)
        x = tl.dot(q_tile, k_tile, input_precision=PRECISION)
        tl.store(out_ptr + block * BLOCK_M, tl.max(x, axis=1))
    num_keys = position + num_rows
    for block in tl.range(num_full, num_blocks.to(tl.int32), num_stages=1):
        key_position = block * BLOCK_SIZE + offs_n
        k_tile = tl.load(
            k_ptr + (key_first + key_position)[None, :] * stride_kt + offs_i[:, None] * stride_ki,
            mask=(key_position < num_keys)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.dot(q_tile, k_tile, input_precision=PRECISION)
        x = tl.where(key_position[None, :] <= (position + offs_m)[:, None], x, float("-inf"))
        tl.store(out_ptr + block * BLOCK_M, tl.max(x, axis=1))


@triton.jit
def _rank_keys(scores, block, num_visible, INIT_BLOCKS: tl.constexpr):
    """64-bit keys that sort as blocks rank: local, the first INIT_BLOCKS, then by score, ties to the lower id.

    scores fp32, block ids and num_visible (local block + 1) broadcast against each other.
    """
    word = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    word = tl.where(word < 0, word ^ 0x7FFFFFFF, word)
    word = tl.minimum(word, INFINITY_WORD)
    word = tl.where(block < INIT_BLOCKS, INIT_WORD, word)
    word = tl.where(block == num_visible - 1, LOCAL_WORD, word)
    key = (word.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64)
    return tl.where(block < num_visible, key, NOT_VISIBLE)


@triton.jit
def _merge_top(best, keys, NUM_BEST: tl.constexpr, BITONIC: tl.constexpr):
    """The NUM_BEST largest of `best` [rows, NUM_BEST] (descending) and `keys` [rows, columns], descending.

    A bitonic network on a GPU. The interpreter walks its exchanges element by element, so there the largest key is
    taken out NUM_BEST times; keys are distinct, and the result is the same.
    """
    if BITONIC:
        merged = tl.bitonic_merge(tl.maximum(best, tl.flip(tl.topk(keys, NUM_BEST), 1)), descending=True)
    else:
        offs_k = tl.arange(0, NUM_BEST)[None, :]
        merged = tl.full(best.shape, NOT_VISIBLE, dtype=tl.int64)
        for rank in range(NUM_BEST):
            largest = tl.maximum(tl.max(best, axis=1), tl.max(keys, axis=1))[:, None]
            merged = tl.where(offs_k == rank, largest, merged)
            best = tl.where(best == largest, NOT_VISIBLE, best)
            keys = tl.where(keys == largest, NOT_VISIBLE, keys)
    return merged


@triton.jit
def _store_ascending(ids_ptr, best, mask, NUM_SELECTED: tl.constexpr, NUM_BEST: tl.constexpr):
    """Store the ids of the first NUM_SELECTED keys of each row ascending, -1 at the end; ids_ptr [rows, 1].

    Each id goes to the place given by the number of smaller ones.
    """
    rank = tl.arange(0, NUM_BEST)[None, :]
    kept = (rank < NUM_SELECTED) & (best != NOT_VISIBLE)
    # Distinct numbers, also for the padding: past every id, by rank.
    order = tl.where(kept, 0x7FFFFFFF - (best & 0xFFFFFFFF), 0x7FFFFFFF + rank.to(tl.int64))
    place = tl.sum((order[:, None, :] < order[:, :, None]).to(tl.int32), axis=2)
    ids = tl.where(kept, order, -1).to(tl.int32)
    tl.store(ids_ptr + place, ids, mask=mask & (place < NUM_SELECTED))


@triton.jit
def _rank_blocks_kernel(
    scores_ptr, query_tiles_ptr, score_tiles_ptr, ids_ptr, first_tile,
    NUM_GROUPS: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_BEST: tl.constexpr, INIT_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BITONIC: tl.constexpr,
):  # fmt: skip
    """One program per ROWS rows of a (query tile, group): the kept ids, from the stored block scores."""
    pid = tl.program_id(0)
    PARTS: tl.constexpr = BLOCK_M // ROWS
    part = pid % PARTS
    group = ((pid // PARTS) % NUM_GROUPS).to(tl.int64)
    number = (first_tile + pid // (PARTS * NUM_GROUPS)).to(tl.int64)
    tile = query_tiles_ptr + number * 4
    first = tl.load(tile)
    num_rows = tl.load(tile + 1).to(tl.int32)
    position = tl.load(tile + 2)
    offset = tl.load(score_tiles_ptr + number * 2)
    num_blocks = tl.load(score_tiles_ptr + number * 2 + 1)
    row = part * ROWS + tl.arange(0, ROWS)
    mask_row = row < num_rows
    # Blocks that each row sees; the last of them is the local one. None for rows past the tile.
    num_visible = tl.where(mask_row, ((position + row) // BLOCK_SIZE).to(tl.int32) + 1, 0)
    base = scores_ptr + offset + group * num_blocks * BLOCK_M + row
    columns = tl.arange(0, COLUMNS)
    best = tl.full((ROWS, NUM_BEST), NOT_VISIBLE, dtype=tl.int64)
    for start in range(0, tl.max(num_visible, axis=0), COLUMNS):
        block = start + columns
        visible = block[None, :] < num_visible[:, None]
        scores = tl.load(base[:, None] + block[None, :].to(tl.int64) * BLOCK_M, mask=visible, other=0.0)
        keys = _rank_keys(scores, block[None, :], num_visible[:, None], INIT_BLOCKS)
        best = _merge_top(best, keys, NUM_BEST, BITONIC)
    out_ptr = ids_ptr + ((first + row) * NUM_GROUPS + group)[:, None] * NUM_SELECTED
    _store_ascending(out_ptr, best, mask_row[:, None], NUM_SELECTED, NUM_BEST)


@triton.jit
def _select_all_kernel(
    q_ptr, k_ptr, query_tiles_ptr, ids_ptr, lse_ptr,
    scale_log2, stride_qt, stride_qg, stride_qi, stride_kt, stride_ki,
    NUM_GROUPS: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_BEST: tl.constexpr, INDEX_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (query tile, group) of documents that have no more blocks than are kept: all ids, and the lse."""
    pid = tl.program_id(0)
    tile = query_tiles_ptr + (pid // NUM_GROUPS).to(tl.int64) * 4
    group = (pid % NUM_GROUPS).to(tl.int64)
    first = tl.load(tile)
    num_rows = tl.load(tile + 1)
    position = tl.load(tile + 2)
    key_first = tl.load(tile + 3)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_SIZE)
    offs_i = tl.arange(0, INDEX_DIM)
    mask_m = offs_m < num_rows
    q_tile = tl.load(
        q_ptr + (first + offs_m)[:, None] * stride_qt + group * stride_qg + offs_i[None, :] * stride_qi,
        mask=mask_m[:, None], other=0.0,
    )  # fmt: skip
    num_keys = position + num_rows
    # Every row sees key 0, so the running maximum is finite from the first block on.
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in tl.range(0, num_keys.to(tl.int32), BLOCK_SIZE, num_stages=STAGES):
        key_position = start + offs_n
        k_tile = tl.load(
            k_ptr + (key_first + key_position)[None, :] * stride_kt + offs_i[:, None] * stride_ki,
            mask=(key_position < num_keys)[None, :], other=0.0,
        )  # fmt: skip
        x = tl.dot(q_tile, k_tile, input_precision=PRECISION) * scale_log2
        x = tl.where(key_position[None, :] <= (position + offs_m)[:, None], x, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, axis=1))
        total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(x - larger[:, None]), axis=1)
        largest = larger
    out = (first + offs_m) * NUM_GROUPS + group
    tl.store(lse_ptr + out, (largest + tl.log2(total)) * LN2, mask=mask_m)
    block = tl.arange(0, NUM_BEST)[None, :]
    ids = tl.where(block <= ((position + offs_m) // BLOCK_SIZE)[:, None], block, -1)
    tl.store(ids_ptr + out[:, None] * NUM_SELECTED + block, ids, mask=mask_m[:, None] & (block < NUM_SELECTED))


@triton.jit(do_not_specialize=["num_blocks"])
def _kept_lse_kernel(
    q_ptr, k_ptr, query_table_ptr, block_table_ptr, pairs_ptr, row_start_ptr, local_end_ptr, row_item_ptr,
    item_row_ptr, chunk_item_ptr, partial_ptr,
    num_blocks, scale_log2, stride_qt, stride_qg, stride_kt,
    NUM_GROUPS: tl.constexpr, NUM_SELECTED: tl.constexpr, INDEX_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per item of the reverse index: the base-2 lse of the block's visible tokens, of each pair."""
    work, start, end, local_end, _item = find_item(
        row_start_ptr, local_end_ptr, row_item_ptr, item_row_ptr, chunk_item_ptr, 0
    )
    if start < end:
        block = work % num_blocks
        group = (work // num_blocks).to(tl.int64)
        first_key = tl.load(block_table_ptr + 3 * block)
        num_keys = tl.load(block_table_ptr + 3 * block + 1)
        key = load_block(k_ptr, first_key, num_keys, 0, stride_kt, 0, BLOCK_SIZE, INDEX_DIM)
        key_row = first_key + tl.arange(0, BLOCK_SIZE)
        PER_QUERY: tl.constexpr = NUM_GROUPS * NUM_SELECTED
        for number in tl.range(start, end, ROWS, num_stages=STAGES):
            is_real, pair, _head = pair_rows(pairs_ptr, number, end, 1, 1, ROWS)
            q_tile = load_rows(q_ptr, pair, PER_QUERY, group, stride_qt, stride_qg, INDEX_DIM)
            # [ROWS, BLOCK_SIZE]; every row sees at least one token of a block it kept
            x = tl.dot(q_tile, tl.trans(key), input_precision=PRECISION) * scale_log2
            if number < local_end:
                last_key = tl.load(query_table_ptr + (pair // PER_QUERY) * 3 + 2)
                x = tl.where(key_row[None, :] <= last_key[:, None], x, float("-inf"))
            largest = tl.max(x, axis=1)
            total = tl.sum(tl.exp2(x - largest[:, None]), axis=1)
            tl.store(partial_ptr + pair, largest + tl.log2(total), mask=is_real)


@triton.jit
def _merge_lse_kernel(
    partial_ptr, ids_ptr, lse_ptr, num_rows,
    NUM_SELECTED: tl.constexpr, NUM_BEST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Natural lse of each row of base-2 partial ones [NUM_SELECTED] where there is an id; -inf where there is none."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, NUM_BEST)
    mask = (row < num_rows)[:, None] & (offs_k < NUM_SELECTED)[None, :]
    place = row[:, None] * NUM_SELECTED + offs_k[None, :]
    is_kept = tl.load(ids_ptr + place, mask=mask, other=-1) >= 0
    x = tl.load(partial_ptr + place, mask=is_kept, other=float("-inf"))
    largest = tl.max(x, axis=1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(x - largest[:, None]), axis=1)
    lse = tl.where(total > 0.0, (largest + tl.log2(tl.where(total > 0.0, total, 1.0))) * LN2, float("-inf"))
    tl.store(lse_ptr + row, lse, mask=row < num_rows)
