"""Elementary functions by a GPU instruction where Triton's own are longer."""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def fast_log2(x, EXACT: tl.constexpr):
    """log2 of fp32 `x` >= 2^-126, off by at most 2^-22 (relative outside 0.5..2) unless EXACT.

    The exact one is a polynomial of fifteen multiply-adds: more than everything else that a KL does to an element.
    """
    if EXACT or INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
