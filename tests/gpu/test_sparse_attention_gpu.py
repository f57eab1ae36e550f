"""sparse_attention and sparse_indexer_kl in Triton on a GPU: bf16, real sizes, addresses past 2^31, memory."""

import math

import pytest
import torch

from msa_pretrain.kernels import Segments, select_blocks, sparse_attention, sparse_indexer_kl
from msa_pretrain.kernels.block_sparse_attention.launch import sparse_attention_triton
from msa_pretrain.kernels.indexer_loss.sparse_launch import sparse_indexer_kl_triton

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HEAD_SHAPES = [(64, 4), (48, 8)]


def random_ids(segments, num_groups, block_size, k, seed=0):
    """Block 0, the local block and random others, as select_blocks gives them; chunks of rows to bound memory."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    num_blocks = max(1, -(-segments.max_k_len // block_size))
    block = torch.arange(num_blocks, device=DEVICE)
    pieces = []
    all_local = torch.where(segments.query_mask(DEVICE), segments.positions(DEVICE) // block_size, -1)
    for local in all_local.split(16384):
        local = local[:, None, None]
        score = torch.rand(local.shape[0], num_groups, num_blocks, generator=generator, device=DEVICE)
        score = score.masked_fill(block == 0, 1.5).masked_fill(block == local, 2.0).masked_fill(block > local, -1.0)
        best = score.topk(min(k, num_blocks), dim=2)
        ids = best.indices.masked_fill(best.values < 0, num_blocks).sort(dim=2).values
        ids = torch.nn.functional.pad(ids, (0, k - ids.shape[2]), value=num_blocks)
        pieces.append(ids.masked_fill(ids == num_blocks, -1).to(torch.int32))
    return torch.cat(pieces)


def randn(*shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE, dtype=dtype)


def attention_inputs(num_queries, num_keys, n, g, d=128, *, kind="random", dtype=torch.bfloat16, block_size=128):
    query = randn(num_queries, n, d, seed=0, dtype=torch.float32)
    key, value = (randn(num_keys, g, d, seed=seed, dtype=torch.float32) for seed in (1, 2))
    if kind == "offset":
        key += 3.0 * randn(1, g, d, seed=3, dtype=torch.float32).sign()
    elif kind == "blocks":
        for seed, tensor in ((4, key), (5, value)):
            block = randn(1 + num_keys // block_size, g, d, seed=seed, dtype=torch.float32)
            tensor += 2.0 * block.repeat_interleave(block_size, 0)[:num_keys]
    grad = randn(num_queries, n, d, seed=6, dtype=torch.float32).to(dtype)
    return [x.to(dtype).requires_grad_() for x in (query, key, value)], grad


def run(function, qkv, grad):
    output, lse = function(*qkv)
    return [output.detach(), lse, *torch.autograd.grad(output, qkv, grad)]


def op(ids, segments, block_size, backend):
    return lambda *qkv: sparse_attention(*qkv, ids, segments, block_size=block_size, backend=backend)


ROUTES = {"keys outer": 0, "query tiles": 2**20}


def triton_op(ids, segments, block_size, route, **sizes):
    return lambda *qkv: sparse_attention_triton(
        *qkv, ids, segments, block_size=block_size, softmax_scale=qkv[0].shape[2] ** -0.5,
        query_tile_up_to=ROUTES[route], **sizes,
    )  # fmt: skip


def eager(ids, segments, block_size):
    """Plain PyTorch in the dtype of the inputs, for one whole document."""
    position = torch.arange(segments.num_queries, device=DEVICE)

    def attend(query, key, value):
        heads = query.shape[1] // key.shape[1]
        outputs = []
        for group in range(key.shape[1]):
            kept = torch.zeros(len(position), len(position) // block_size + 2, dtype=torch.bool, device=DEVICE)
            kept.scatter_(1, ids[:, group].long() % kept.shape[1], True)  # -1 goes to the last column
            mask = kept[:, position // block_size] & (position <= position[:, None])
            for head in range(group * heads, (group + 1) * heads):
                scores = (query[:, head] @ key[:, group].T) * query.shape[2] ** -0.5
                outputs.append(scores.masked_fill(~mask, -math.inf).softmax(dim=1) @ value[:, group])
        return torch.stack(outputs, dim=1), query.new_zeros(query.shape[:2], dtype=torch.float32)

    return attend


def relative(actual, expected):
    kept = expected.isfinite()
    assert torch.equal(actual.isfinite(), kept)
    difference = actual[kept].double() - expected[kept].double()
    return (difference.norm() / expected[kept].double().norm()).item()


NAMES = ("output", "lse", "d_query", "d_key", "d_value")


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize("kind", ["random", "offset", "blocks"])
@pytest.mark.parametrize("n, g", HEAD_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_pytorch(n, g, kind, dtype, route):
    """4,096 tokens, k=8 of 32 blocks, both norms; prints the share of the error of the fp32-inside reference too."""
    segments = Segments.from_cu_seqlens([0, 4096])
    ids = random_ids(segments, g, 128, 8)
    qkv, grad = attention_inputs(4096, 4096, n, g, kind=kind, dtype=dtype)
    actual = run(triton_op(ids, segments, 128, route), qkv, grad)
    same = run(eager(ids, segments, 128), qkv, grad)
    inside = run(op(ids, segments, 128, "reference"), qkv, grad)
    truth = run(op(ids, segments, 128, "reference"), [x.detach().double().requires_grad_() for x in qkv], grad.double())
    line = []
    for name, a, s, r, exact in zip(NAMES, actual, same, inside, truth, strict=True):
        if name == "lse":
            assert (a - exact).abs().max() < 1e-5
            continue
        for norm in (math.inf, 2):
            errors = [torch.linalg.vector_norm(x.double() - exact, norm).item() for x in (a, s, r)]
            line.append(
                f"{name}/{norm}: {errors[0] / errors[1]:.2f} of eager, {errors[0] / errors[2]:.2f} of fp32-inside"
            )
            assert errors[0] <= 2 * errors[1], line[-1]
    print(f"\n{n}/{g} {kind} {dtype} {route}: " + "; ".join(line))


# Against the reference with fp32 inside. Measured, at most: bf16 3e-3, fp16 5e-4, fp32 1e-6.
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 3e-6}


def check_kl(segments, ids, g, block_size, index_dim, qkv, lse, limit):
    dtype, (num_queries, num_keys) = qkv[0].dtype, (segments.num_queries, segments.num_keys)
    index_query = randn(num_queries, g, index_dim, seed=8, dtype=torch.float32).to(dtype).requires_grad_()
    index_key = randn(num_keys, index_dim, seed=9, dtype=torch.float32).to(dtype).requires_grad_()
    arguments = (index_query, index_key, qkv[0].detach(), qkv[1].detach(), lse, ids, segments)
    results = []
    for backend in ("triton", "reference"):
        kl = sparse_indexer_kl(*arguments, block_size=block_size, backend=backend)
        grad = randn(*kl.shape, seed=10, dtype=torch.float32).abs() + 0.5
        results.append([kl.detach(), *torch.autograd.grad(kl, (index_query, index_key), grad)])
    rows = segments.query_mask(DEVICE)
    for name, a, e in zip(("kl", "d_index_query", "d_index_key"), *results, strict=True):
        if len(a) == len(rows):
            assert (a[~rows] == 0).all(), name
        error = relative(a, e)
        assert error < (2e-6 if name == "kl" else limit), f"{name}: {error:.1e}"


@pytest.mark.parametrize("n, g", HEAD_SHAPES)
def test_packed_16k_and_fragments(n, g):
    """16,384 tokens in 5 documents; then the second half of the longest as a fragment equals its rows."""
    borders = [0, 507, 1528, 1656, 8000, 16384]
    segments = Segments.from_cu_seqlens(borders)
    ids = random_ids(segments, g, 128, 16)
    qkv, grad = attention_inputs(16384, 16384, n, g)
    actual = run(op(ids, segments, 128, "triton"), qkv, grad)
    expected = run(op(ids, segments, 128, "reference"), qkv, grad)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        error = relative(a, e)
        assert error < (1e-6 if name == "lse" else LIMITS[torch.bfloat16]), f"{name}: {error:.1e}"
    check_kl(segments, ids, g, 128, 128, qkv, actual[1], LIMITS[torch.bfloat16])
    half = slice(12000, 16384)
    fragment = Segments(((0, 4384, 8000, 8384),), 4384, 16384)
    output, lse = sparse_attention(qkv[0][half], *qkv[1:], ids[half], fragment, block_size=128, backend="triton")
    assert torch.equal(output, actual[0][half]) and torch.equal(lse, actual[1][half])


@pytest.mark.parametrize("n, g", HEAD_SHAPES)
def test_twenty_runs_give_the_same_bits(n, g):
    segments = Segments.from_cu_seqlens([0, 1000, 6000])
    ids = random_ids(segments, g, 128, 16)
    qkv, grad = attention_inputs(6000, 6000, n, g)
    index_query = randn(6000, g, 128, seed=8, dtype=torch.bfloat16).requires_grad_()
    index_key = randn(6000, 128, seed=9, dtype=torch.bfloat16).requires_grad_()

    def everything():
        results = run(op(ids, segments, 128, "triton"), qkv, grad)
        teacher = (qkv[0].detach(), qkv[1].detach(), results[1])
        kl = sparse_indexer_kl(index_query, index_key, *teacher, ids, segments, block_size=128, backend="triton")
        return [*results, kl.detach(), *torch.autograd.grad(kl.sum(), (index_query, index_key))]

    first = everything()
    for _ in range(19):
        for a, b in zip(everything(), first, strict=True):
            assert torch.equal(a, b)


def test_query_chunks_change_no_output_bit():
    segments = Segments.from_cu_seqlens([0, 1000, 3000])
    ids = random_ids(segments, 4, 128, 8)
    qkv, grad = attention_inputs(3000, 3000, 24, 4)

    one, many = (run(triton_op(ids, segments, 128, "keys outer", query_chunk=size), qkv, grad) for size in (16384, 700))
    for a, b in zip(one[:3], many[:3], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one[3:], many[3:], strict=True):
        assert relative(a, b) < 3e-3


@pytest.mark.parametrize("route", list(ROUTES))
def test_rows_past_two_to_the_31_elements(route):
    """Views into buffers of more than 2^31 elements equal the same rows copied out, forward and backward."""
    n, g, length = 16, 1, 700
    wide = 2**31 // length + 4096  # row stride: the last rows start past 2^31
    segments = Segments.from_cu_seqlens([0, length])
    ids = random_ids(segments, g, 128, 4)
    (query, key, value), grad = attention_inputs(length, length, n, g)
    expected = run(triton_op(ids, segments, 128, route), (query, key, value), grad)
    buffer = torch.empty(length, wide, dtype=torch.bfloat16, device=DEVICE)
    views = []
    for number, tensor in enumerate((query, key, value, grad)):
        size = tensor[0].numel()
        views.append(buffer[:, number * 4096 : number * 4096 + size].view(tensor.shape))
        views[-1].copy_(tensor.detach())
    qkv = [view.detach().requires_grad_() for view in views[:3]]
    for a, e in zip(run(triton_op(ids, segments, 128, route), qkv, views[3]), expected, strict=True):
        assert torch.equal(a, e)


def test_270k_tokens_of_64_heads():
    """The last 64 queries (element offsets past 2^31) equal the same queries run as a fragment of their own."""
    num_tokens, n, g = 270_000, 64, 4
    segments = Segments.from_cu_seqlens([0, num_tokens])
    query = randn(num_tokens, n, 128, seed=0, dtype=torch.bfloat16)
    key, value = (randn(num_tokens, g, 128, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    ids = random_ids(segments, g, 128, 16)
    output, lse = sparse_attention(query, key, value, ids, segments, block_size=128, backend="triton")
    tail = slice(num_tokens - 64, num_tokens)
    fragment = Segments(((0, 64, 0, num_tokens),), 64, num_tokens)
    arguments = (query[tail].clone(), key, value, ids[tail].clone(), fragment)
    expected, expected_lse = sparse_attention(*arguments, block_size=128, backend="reference")
    assert relative(output[tail], expected) < LIMITS[torch.bfloat16]
    assert (lse[tail] - expected_lse).abs().max() < 1e-5


def test_memory_at_128k_tokens():
    """Forward and backward of one layer within 24 GiB besides inputs and gradients; the KL within 4."""
    num_tokens, n, g = 131_072, 64, 4
    segments = Segments.from_cu_seqlens([0, num_tokens])
    ids = random_ids(segments, g, 128, 16)
    query = randn(num_tokens, n, 128, seed=0, dtype=torch.bfloat16).requires_grad_()
    key, value = (randn(num_tokens, g, 128, seed=s, dtype=torch.bfloat16).requires_grad_() for s in (1, 2))
    grad = randn(num_tokens, n, 128, seed=6, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output, lse = sparse_attention(query, key, value, ids, segments, block_size=128, backend="triton")
    gradients = torch.autograd.grad(output, (query, key, value), grad)
    results = sum(x.numel() * x.element_size() for x in gradients)
    peak = (torch.cuda.max_memory_allocated() - before - results) / 2**30
    print(f"\nattention at 128K tokens: peak {peak:.2f} GiB besides inputs and gradients")
    assert peak < 24
    del gradients, output
    index_query = randn(num_tokens, g, 128, seed=8, dtype=torch.bfloat16).requires_grad_()
    index_key = randn(num_tokens, 128, seed=9, dtype=torch.bfloat16).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    teacher = (query.detach(), key.detach(), lse)
    kl = sparse_indexer_kl_triton(
        index_query, index_key, *teacher, ids, segments, block_size=128, softmax_scale=128**-0.5
    )
    torch.autograd.grad(kl.mean(), (index_query, index_key))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"KL at 128K tokens: peak {peak:.2f} GiB")
    assert peak < 4


def test_a_forward_over_a_million_tokens():
    """Selection and attention within 60 GiB, inputs and output (34 GiB) included; the last rows are the reference's."""
    num_tokens, n, g = 2**20, 64, 4
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    segments = Segments.from_cu_seqlens([0, num_tokens])
    query = randn(num_tokens, n, 128, seed=0, dtype=torch.bfloat16)
    key, value = (randn(num_tokens, g, 128, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    index_query = randn(num_tokens, g, 128, seed=3, dtype=torch.bfloat16)
    index_key = randn(num_tokens, 128, seed=4, dtype=torch.bfloat16)
    sizes = {"block_size": 128, "backend": "triton"}
    with torch.no_grad():
        ids, _ = select_blocks(index_query, index_key, segments, num_selected_blocks=16, **sizes)
        output, lse = sparse_attention(query, key, value, ids, segments, dense_up_to=2048, **sizes)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"\nforward at 1M tokens: peak {peak:.2f} GiB, inputs and output included")
    assert peak < 60
    tail = slice(num_tokens - 64, num_tokens)
    fragment = Segments(((0, 64, 0, num_tokens),), 64, num_tokens)
    arguments = (query[tail].clone(), key, value, ids[tail].clone(), fragment)
    expected, expected_lse = sparse_attention(*arguments, block_size=128, backend="reference")
    assert relative(output[tail], expected) < LIMITS[torch.bfloat16]
    assert (lse[tail] - expected_lse).abs().max() < 1e-5


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("n, g", HEAD_SHAPES)
def test_the_dense_route_changes_no_result(n, g, deterministic):
    """Documents on both sides of k * l = 2,048 tokens, among them lengths that go to each library kernel."""
    segments = Segments.from_cu_seqlens([0, 1024, 3071, 5119, 7168, 9217, 9218, 12218], 12220)
    ids = random_ids(segments, g, 128, 16)
    qkv, grad = attention_inputs(12220, 12220, n, g)

    def routed(dense_up_to):
        return lambda *x: sparse_attention(*x, ids, segments, block_size=128, dense_up_to=dense_up_to, backend="triton")

    torch.use_deterministic_algorithms(deterministic)
    try:
        sparse, mixed, again = (run(routed(limit), qkv, grad) for limit in (0, 2048, 2048))
    finally:
        torch.use_deterministic_algorithms(False)
    long = segments.split_at(2048)[1].query_mask(DEVICE)
    for name, a, e, b in zip(NAMES, mixed, sparse, again, strict=True):
        error = relative(a, e)
        assert error < (1e-6 if name == "lse" else 2 * LIMITS[torch.bfloat16]), f"{name}: {error:.1e}"
        assert torch.equal(a, b) or not deterministic, name
        if name in NAMES[:3]:
            assert torch.equal(a[long], e[long]), name
