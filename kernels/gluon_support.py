"""Gluon by the names of Triton 3.7 and later; 3.6 has others. To be imported only where a kernel of it runs."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
"""reinterpret(shared, dtype, shape, layout): the same shared memory as another tensor."""

if hasattr(tma, "async_load"):
    tma_load, tma_store, async_load = tma.async_load, tma.async_store, async_copy.async_load
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    async_load = async_copy.async_copy_global_to_shared
