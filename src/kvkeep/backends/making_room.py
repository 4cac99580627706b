"""make_room: allocate a batch, evicting as little as needed, and nothing in vain.

Called by a tier with its lock held. The tier says what may go, in which order, and how to let it
go; allocating and counting stand here. Nothing is taken before there is room for all of it, so two
who want more than there is never hold half each, nor wake each other by giving it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvkeep.keys import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryAllocatorInterface, MemoryObj


@dataclass(frozen=True, slots=True)
class Room:
    """A batch of equal objects that is wanted.

    Attributes:
        shape: of one object.
        dtype: element type.
        batch_size: how many.
        fmt: arrangement.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_size: int
    fmt: MemoryFormat

    @property
    def object_bytes(self) -> int:
        """Bytes of one object."""
        return math.prod(self.shape) * self.dtype.itemsize

    def missing_in(self, allocator: MemoryAllocatorInterface) -> int:
        """How many of the objects have no room yet."""
        return self.batch_size - allocator.room_for(self.object_bytes, self.fmt)

    def take_from(self, allocator: MemoryAllocatorInterface) -> list[MemoryObj] | None:
        """All objects, or None if there is no room for all of them."""
        return allocator.batched_allocate(self.shape, self.dtype, self.batch_size, self.fmt)


def make_room(
    room: Room,
    allocator: MemoryAllocatorInterface,
    candidates: Callable[[int], list[ChunkKey]],
    evict: Callable[[ChunkKey], None],
    size_of: Callable[[ChunkKey], int],
) -> list[MemoryObj] | None:
    """Allocate ``room``, evicting one chunk after the other until there is enough.

    Where all objects are about equally large, nothing is evicted unless that makes enough room. A
    pool of very different sizes can turn out too fragmented after evictions.

    Args:
        room: what is wanted.
        allocator: the pool.
        candidates: up to that many chunks that may go, best first.
        evict: lets one go; its memory is free afterwards.
        size_of: bytes of a chunk.
    """
    while True:
        missing = room.missing_in(allocator)
        if missing <= 0:
            objs = room.take_from(allocator)
            if objs is not None:
                return objs
            missing = 1  # the free ranges are too short
        chosen = candidates(missing)
        gained_bytes = sum(map(size_of, chosen))
        if not chosen or (len(chosen) < missing and gained_bytes < missing * room.object_bytes):
            return None
        for key in chosen:
            evict(key)
            if room.missing_in(allocator) <= 0:
                break
