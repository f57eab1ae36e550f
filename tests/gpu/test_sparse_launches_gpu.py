"""The reverse index and the query tiles at real sizes; sparse_attention never waits and records into a CUDA graph."""

import pytest
import torch

from msa_pretrain.kernels import Segments, sparse_attention
from msa_pretrain.kernels.block_sparse_attention.launch import sparse_attention_triton
from msa_pretrain.kernels.block_sparse_attention.reverse_index import build_reverse_index, document_tables

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BORDERS = [0, 1000, 3000, 6100, 11000]
SIZES = {"block_size": 128, "query_chunk": 4096, "item_queries": 512}
FIELDS = ("pairs", "row_start", "local_end", "row_item", "row_slot", "item_row", "chunk_item")


def random_ids(segments, num_groups, k, seed=0):
    """The local block and random others, as select_blocks gives them."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    num_blocks = -(-segments.max_k_len // 128)
    local = torch.where(segments.query_mask(DEVICE), segments.positions(DEVICE) // 128, -1)[:, None, None]
    block = torch.arange(num_blocks, device=DEVICE)
    score = torch.rand(segments.num_queries, num_groups, num_blocks, generator=generator, device=DEVICE)
    score = score.masked_fill(block > local, -1.0).masked_fill(block == local, 2.0)
    best = score.topk(min(k, num_blocks), dim=2)
    ids = best.indices.masked_fill(best.values < 0, num_blocks).sort(dim=2).values
    ids = torch.nn.functional.pad(ids, (0, k - ids.shape[2]), value=num_blocks)
    return ids.masked_fill(ids == num_blocks, -1).to(torch.int32)


@pytest.fixture
def no_waiting():
    """Every wait for the device raises."""

    def forbid():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield forbid
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("num_groups", [4, 8])
def test_the_index_is_that_of_the_interpreter(num_groups, no_waiting):
    segments = Segments.from_cu_seqlens(BORDERS, 11010)
    ids = random_ids(segments, num_groups, 16)
    query_table, block_table = document_tables(segments, 128, DEVICE)
    no_waiting()
    index = build_reverse_index(ids, query_table, len(block_table), **SIZES)
    torch.cuda.set_sync_debug_mode("default")
    position, num_rows = query_table[:, 1].long(), index.local_end.numel()
    blocks = position // 128
    chunk = torch.arange(len(ids), device=DEVICE) // SIZES["query_chunk"]
    row = chunk[:, None] * num_groups + torch.arange(num_groups, device=DEVICE)
    row = (row * len(block_table) + query_table[:, :1])[:, :, None] + ids
    visible = (ids >= 0) & (position >= 0)[:, None, None]
    key = torch.where(visible, 2 * row + (ids < blocks[:, None, None]), 2 * num_rows).flatten()
    key, pairs = key.sort(stable=True)
    borders = torch.searchsorted(key, torch.arange(2 * num_rows + 1, device=DEVICE))
    items = -(-borders[::2].diff() // SIZES["item_queries"])
    slots = torch.where(items > 1, items, 0).view(index.num_chunks, -1).cumsum(1).flatten() - items
    row_item = torch.cat([items.new_zeros(1), items.cumsum(0)])
    item_row = torch.arange(num_rows, device=DEVICE).repeat_interleave(items)
    chunk_item = row_item[:: num_rows // index.num_chunks]
    expected = (pairs, borders[::2], borders[1::2], row_item, slots, item_row, chunk_item)
    for name, tensor in zip(FIELDS, expected, strict=True):
        assert torch.equal(getattr(index, name)[: len(tensor)].long(), tensor), name


def inputs(n, g, num_queries, num_keys):
    generator = torch.Generator(DEVICE).manual_seed(1)
    shapes = ((num_queries, n, 128), (num_keys, g, 128), (num_keys, g, 128), (num_queries, n, 128))
    tensors = [torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors[:3]], tensors[3]


@pytest.mark.parametrize("n, g", [(64, 4), (48, 8)])
def test_forward_and_backward_never_wait_and_replay_from_a_graph(n, g, no_waiting):
    """Dense, short and long documents and padding; a replay on other numbers equals the ops on them."""
    segments = Segments.from_cu_seqlens(BORDERS, 11010)
    ids = random_ids(segments, g, 16)
    qkv, grad = inputs(n, g, 11010, 11010)

    def step():
        output, lse = sparse_attention(*qkv, ids, segments, block_size=128, dense_up_to=2048, backend="triton")
        return [output, lse, *torch.autograd.grad(output, qkv, grad)]

    # the dense route's library is deterministic only when told to be
    torch.use_deterministic_algorithms(True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    no_waiting()
    step()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for tensor in qkv:
            tensor.mul_(0.5)
        ids.copy_(random_ids(segments, g, 16, seed=7))
    graph.replay()
    for number, (a, b) in enumerate(zip(captured, step(), strict=True)):
        assert torch.equal(a, b), number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n, g", [(64, 4), (48, 8)])
def test_query_tiles_change_no_result(n, g, dtype):
    """Documents below, at and past 4,096 tokens, the end of a nested range, padding, by each route.

    Against the reference with fp32 inside; a query whose document keeps its route keeps its bits.
    """
    documents = ((0, 2049, 0, 2049), (2049, 4096, 2049, 4096), (6145, 4097, 6145, 4097), (10245, 700, 6145, 3900))
    segments = Segments(documents, 10950, 10250)
    ids = random_ids(segments, g, 16)
    qkv, grad = inputs(n, g, 10950, 10250)
    qkv, grad = [x.detach().to(dtype).requires_grad_() for x in qkv], grad.to(dtype)

    def results(backend, limit=0):
        if backend == "reference":
            output, lse = sparse_attention(*qkv, ids, segments, block_size=128, backend=backend)
        else:
            output, lse = sparse_attention_triton(
                *qkv, ids, segments, block_size=128, softmax_scale=128**-0.5, query_tile_up_to=limit
            )
        return [output.detach(), lse, *torch.autograd.grad(output, qkv, grad)]

    expected = results("reference")
    kept = expected[1].isfinite()
    by_route = {limit: results("triton", limit) for limit in (0, 4096, 2**20)}
    for limit, actual in by_route.items():
        assert torch.equal(actual[1].isfinite(), kept) and (actual[0][~kept] == 0).all()
        assert (actual[1][kept] - expected[1][kept]).abs().max() < 1e-5
        for number in (0, 2, 3, 4):
            error = (actual[number].float() - expected[number].float()).norm() / expected[number].float().norm()
            # Measured, keys outer: bf16 3e-3, fp16 5e-4.
            assert error < {torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype], f"{limit} {number}: {error:.1e}"
        for a, b in zip(results("triton", limit), actual, strict=True):
            assert torch.equal(a, b), limit
    past = slice(6145, 10242)
    for number in (0, 1):
        assert torch.equal(by_route[4096][number][past], by_route[0][number][past])
        assert torch.equal(by_route[4096][number][:6145], by_route[2**20][number][:6145])
