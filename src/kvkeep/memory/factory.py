"""initialize_allocator: the allocator that a CPU tier uses, from its size."""

from __future__ import annotations

from kvkeep.memory.arena import Arena
from kvkeep.memory.base import MemoryAllocatorInterface
from kvkeep.memory.general import GeneralAllocator
from kvkeep.memory.mixed import MixedMemoryAllocator
from kvkeep.memory.paged import PagedAllocator
from kvkeep.memory.pool import ALIGNMENT_BYTES, PoolAllocator, ReleaseSignal


def initialize_allocator(
    size_bytes: int,
    *,
    chunk_bytes: int | None,
    buffer_bytes: int = 0,
    shared_name: str | None = None,
    huge_pages: bool = True,
) -> MemoryAllocatorInterface:
    """An allocator with an arena of its own, which its ``close()`` gives back.

    Args:
        size_bytes: all of its memory. Nothing is committed before it is used.
        chunk_bytes: size of the largest KV object, for equal slots; None for objects of any size.
        buffer_bytes: how much of ``size_bytes`` is kept for objects of the format BINARY; 0 is no
            part of its own, they then come from the same pool as KV.
        shared_name: make the memory shared, under this name.
        huge_pages: ask for huge pages, where the system gives them on request.

    Raises:
        ValueError: a size is not positive, or the buffers leave no room for KV.
        OwnershipError: a living process has shared memory of this name.
        OSError: the system refuses.
    """
    if buffer_bytes < 0 or buffer_bytes >= size_bytes > 0:
        raise ValueError(f"{buffer_bytes} bytes of buffers leave nothing for KV of {size_bytes}")
    arena = Arena(size_bytes, shared_name=shared_name, huge_pages=huge_pages)
    try:
        return _build(arena, chunk_bytes, buffer_bytes)
    except BaseException:
        arena.close()
        raise


def _build(arena: Arena, chunk_bytes: int | None, buffer_bytes: int) -> MemoryAllocatorInterface:
    signal = ReleaseSignal()
    tensor_bytes = arena.size_bytes
    if buffer_bytes:
        tensor_bytes = (tensor_bytes - buffer_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    tensors: PoolAllocator
    if chunk_bytes is None:
        tensors = GeneralAllocator(arena, size_bytes=tensor_bytes, signal=signal)
    else:
        tensors = PagedAllocator(arena, chunk_bytes, size_bytes=tensor_bytes, signal=signal)
    if not buffer_bytes:
        return tensors
    return MixedMemoryAllocator(
        tensors, GeneralAllocator(arena, offset=tensor_bytes, signal=signal)
    )
