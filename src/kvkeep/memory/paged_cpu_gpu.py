"""PagedCpuGpuMemoryAllocator: equal slots that other machines' network cards can address.

For transfers between nodes a pool is registered once, as one range; after that a slot is named by
its number. So slots are whole memory pages, lie without gaps, and never move. Objects of every
format take slots of this one pool.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from kvkeep.errors import OwnershipError
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.paged import PagedAllocator
from kvkeep.memory.pool import ReleaseSignal


@dataclass(frozen=True, slots=True)
class PoolExport:
    """All that somebody else needs to address the slots of a pool.

    Slot ``i`` is the bytes [base_offset + i * slot_bytes, base_offset + (i + 1) * slot_bytes) of
    the arena.

    Attributes:
        shared_name: name of the arena for :meth:`kvkeep.memory.arena.Arena.attach`; None if it is
            not shared.
        base_offset: where the first slot starts in the arena, on a memory page.
        slot_bytes: size of a slot, whole memory pages.
        num_slots: how many there are.
    """

    shared_name: str | None
    base_offset: int
    slot_bytes: int
    num_slots: int


class PagedCpuGpuMemoryAllocator(PagedAllocator):
    """Page-aligned slots in one contiguous range of an arena."""

    def __init__(
        self,
        arena: Arena,
        slot_bytes: int,
        *,
        offset: int = 0,
        size_bytes: int | None = None,
        signal: ReleaseSignal | None = None,
    ) -> None:
        """Cut a range of the arena into slots; see :class:`PagedAllocator`.

        Raises:
            ValueError: a size is not positive, ``offset`` is no multiple of a memory page, or the
                range is not free.
        """
        if offset % mmap.PAGESIZE:
            raise ValueError(f"the pool must start on a memory page, not at {offset}")
        whole_pages = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        super().__init__(arena, whole_pages, offset=offset, size_bytes=size_bytes, signal=signal)

    def export(self) -> PoolExport:
        """How others address the slots.

        Raises:
            OwnershipError: the pool is closed.
        """
        with self.count_lock:
            if self._array is None:
                raise OwnershipError("a pool was exported after it was closed")
            return PoolExport(self.arena.shared_name, self._start, self.slot_bytes, self.num_slots)

    def slot_of(self, obj: MemoryObj) -> int:
        """Number of the slot that ``obj`` is in, for as long as it is held.

        Raises:
            OwnershipError: it is no living object of this pool.
        """
        with self.count_lock:
            if self._living.get(obj.offset) is not obj:
                raise OwnershipError(f"{obj!r} is in no slot of this pool")
            return (obj.offset - self._start) // self.slot_bytes
