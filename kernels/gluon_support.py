"""What the Gluon kernels share. To be imported only where one runs.

Names are those of Triton 3.7 and later; 3.6 has others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
"""reinterpret(shared, dtype, shape, layout): the same shared memory as another tensor."""

if hasattr(tma, "async_load"):
    tma_load, tma_store, async_load = tma.async_load, tma.async_store, async_copy.async_load
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    async_load = async_copy.async_copy_global_to_shared


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers in shared memory, of so many arrivals a use. They are waited for by the parity of their uses.

    A "full" one is first completed by the first tile; an "empty" one counts as completed before, so that the first tile
    does not wait: it is waited for by the other parity.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers
