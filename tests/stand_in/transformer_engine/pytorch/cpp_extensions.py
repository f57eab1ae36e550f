"""The grouped GEMM, an expert after the other, with what the real one asserts or takes for granted."""

import torch

CALLS: list[dict] = []
"""What it was called with, for tests."""


def general_grouped_gemm(
    A,
    B,
    out,
    quantization_params,
    out_dtype,
    layout="TN",
    m_splits=None,
    gelu=False,
    grad=False,
    accumulate=False,
    bias=None,
    use_bias=False,
    use_split_accumulator=False,
    D_dtype=None,
    single_output=False,
):
    CALLS.append(dict(layout=layout, m_splits=m_splits, grad=grad, accumulate=accumulate, single_output=single_output))
    assert len(A) == len(B) == len(quantization_params) == len(m_splits)
    assert not any(quantization_params) and not gelu and not use_bias and not accumulate
    assert all(type(rows) is int for rows in m_splits)
    assert all(isinstance(tensors, list) for tensors in (A, B, out)), "pybind wants lists"
    assert all(tensor.is_contiguous() for tensor in (*A, *B, *out)), "addresses and shapes are all that cuBLAS sees"
    assert len({tensor.dtype for tensor in (*A, *B, *out)} | {out_dtype}) == 1
    if single_output:
        (whole,) = out
        out = whole.split(m_splits)
    for a, b, result in zip(A, B, out, strict=True):
        left = a.mT if layout[0] == "T" else a
        right = b.mT if layout[1] == "T" else b
        assert result.shape == (right.shape[0], left.shape[1])
        with torch.no_grad():
            result.copy_(right @ left) if a.numel() and b.numel() else result.zero_()
    return out, [torch.empty(0)] * len(A), [torch.empty(0)] * len(A)
