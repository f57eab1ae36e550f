"""One pass of every kernel at awkward sizes, for a memory checker (results: docs/results/memcheck.md):

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python tests/gpu/memcheck_pass.py

Without PyTorch's cache every tensor is an allocation of its own, so a read one element past its end is seen. Nothing is
compared here.
"""

import torch

from msa_pretrain.kernels import (
    Segments,
    attach_dense_kl,
    decode_attention,
    dense_attention,
    dense_indexer_kl,
    select_blocks,
    sparse_attention,
    sparse_attention_with_kl,
    sparse_indexer_kl,
)

CASES = [
    # heads per group, groups, head dim, index dim, block size, k, dtype, borders
    (6, 2, 128, 128, 128, 16, torch.bfloat16, [0, 1, 130, 130, 700]),
    (16, 1, 128, 64, 64, 3, torch.float16, [0, 507]),
    (5, 3, 64, 128, 128, 2, torch.float32, [0, 129, 400]),
    (1, 1, 32, 16, 16, 32, torch.bfloat16, [0, 15, 616]),
]


def one_pass(heads, g, d, i, block_size, k, dtype, borders):
    num_tokens = borders[-1] + 1
    segments = Segments.from_cu_seqlens(borders, num_tokens)

    def draw(*shape):
        return torch.randn(shape, device="cuda").to(dtype).requires_grad_()

    query, key, value = draw(num_tokens, heads * g, d), draw(num_tokens, g, d), draw(num_tokens, g, d)
    index_query, index_key = draw(num_tokens, g, i), draw(num_tokens, i)
    sizes = {"block_size": block_size, "backend": "triton"}
    with torch.no_grad():
        ids, index_lse = select_blocks(index_query, index_key, segments, num_selected_blocks=k, **sizes)
    output, lse = sparse_attention(query, key, value, ids, segments, **sizes)
    kl = sparse_indexer_kl(index_query, index_key, query, key, lse, ids, segments, **sizes)
    # Every token is visible to the full-sequence KL; any finite lse will do for a memory check.
    dense_kl = dense_indexer_kl(index_query, index_key, query, key, lse.nan_to_num(0, 0, 0), segments, backend="triton")
    (output.float().square().sum() + kl.sum() + dense_kl.sum()).backward()
    loss = dict(kl_weight=1.0, record=lambda kl: None)
    index = index_query, index_key
    sparse = sparse_attention_with_kl(
        query, key, value, *index, ids, index_lse, segments, block_size=block_size, dense_up_to=block_size, **loss
    )
    dense, lse = dense_attention(query, key, value, segments, backend="triton")
    warmup = attach_dense_kl(dense, *index, query, key, lse, segments, **loss)
    (sparse.float().square().sum() + warmup.float().square().sum()).backward()
    lengths = torch.tensor([num_tokens, 1, 0], device="cuda")
    caches = [x.detach()[None].repeat(3, *[1] * x.dim()) for x in (key, value, index_key)]
    decode_attention(
        query.detach()[:3], *caches[:2], index_query.detach()[:3], caches[2], lengths, num_selected_blocks=k, **sizes
    )
    torch.cuda.synchronize()


if __name__ == "__main__":
    for case in CASES:
        one_pass(*case)
        print("done", case, flush=True)
