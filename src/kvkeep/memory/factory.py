"""initialize_allocator: the allocator that a CPU tier uses, and what was chosen for it."""

from __future__ import annotations

from kvkeep.memory.allocators import (
    ALIGNMENT_BYTES,
    GeneralAllocator,
    MixedMemoryAllocator,
    PagedAllocator,
    PagedCpuGpuMemoryAllocator,
    PoolAllocator,
    ReleaseSignal,
)
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import MemoryAllocatorInterface
from kvkeep.memory.placement import AllocatorReport, Choice


def initialize_allocator(
    size_bytes: int,
    *,
    chunk_bytes: int | None,
    buffer_bytes: int = 0,
    is_registrable: bool = False,
    shared_name: str | None = None,
    shareable: bool = False,
    huge_pages: bool = True,
    numa: tuple[int | None, Choice] | None = None,
) -> MemoryAllocatorInterface:
    """An allocator with an arena of its own, which its ``close()`` gives back.

    Args:
        size_bytes: all of its memory. Nothing is committed before it is used.
        chunk_bytes: size of the largest KV object, for equal slots; None for objects of any size.
        buffer_bytes: how much of ``size_bytes`` is kept for objects of the format BINARY; 0 is no
            part of its own, they then come from the same pool as KV.
        is_registrable: equal slots on memory pages, which other nodes can address.
        shared_name: make the memory shared, under this name.
        shareable: make it shared in any case, so that its descriptor can be sent to others.
        huge_pages: ask for huge pages, where the system gives them on request.
        numa: the memory node to prefer and why (``choose_node``); None
            leaves it to the system.

    Raises:
        ValueError: a size is not positive, the buffers leave no room for KV, or slots that can be
            addressed have no size or share their pool with buffers.
        OwnershipError: a living process has shared memory of this name.
        OSError: the system refuses.
    """
    if buffer_bytes < 0 or buffer_bytes >= size_bytes > 0:
        raise ValueError(f"{buffer_bytes} bytes of buffers leave nothing for KV of {size_bytes}")
    if is_registrable and (chunk_bytes is None or buffer_bytes):
        raise ValueError("a pool that can be registered needs equal slots, and nothing but them")
    arena = Arena(size_bytes, shared_name=shared_name, shareable=shareable, huge_pages=huge_pages)
    try:
        if numa is not None:
            node, why = numa
            arena.place_on(why, node)
        if is_registrable and chunk_bytes is not None:
            return PagedCpuGpuMemoryAllocator(arena, chunk_bytes)
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


def tensor_pool(allocator: MemoryAllocatorInterface) -> PoolAllocator:
    """The pool that KV comes from.

    Args:
        allocator: one that :func:`initialize_allocator` made.

    Raises:
        TypeError: it is another one.
    """
    if isinstance(allocator, MixedMemoryAllocator):
        return allocator.tensor_allocator
    if isinstance(allocator, PoolAllocator):
        return allocator
    raise TypeError(f"{type(allocator).__name__} is no allocator with a pool of its own")


def report_on(allocator: MemoryAllocatorInterface, *choices: Choice) -> AllocatorReport:
    """What an allocator is, and why.

    Args:
        allocator: one that :func:`initialize_allocator` made.
        choices: what was decided before it was made; they come first.
    """
    tensors = tensor_pool(allocator)
    facts = [*choices, *tensors.arena.choices]
    if isinstance(tensors, PagedAllocator):
        text = f"{tensors.num_slots} of {tensors.slot_bytes} bytes"
        facts.append(Choice("slots", text, "every chunk has one"))
        if tensors.pinning is None:
            facts.append(Choice("pinned memory", "no", "there is no CUDA device"))
        else:
            facts.append(Choice("pinned memory", "as it is used", "CUDA copies faster from it"))
    if isinstance(allocator, MixedMemoryAllocator):
        size = allocator.buffer_allocator.usage().capacity_bytes
        facts.append(Choice("byte buffers", f"{size} bytes", "kept apart from KV"))
    return AllocatorReport(type(allocator).__name__, tensors.arena.size_bytes, tuple(facts))
