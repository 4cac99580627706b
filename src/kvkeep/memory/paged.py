"""PagedAllocator: equal slots, each for one object of any shape that fits.

Every operation is O(1) per object. A slot that was given back is handed out again first, since its
memory is committed and warm; a slot that was never used comes last, in the order of the offsets, so
that a pool that is not full commits no more than it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvkeep.errors import OwnershipError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import MemoryReport
from kvkeep.memory.pinned import HostPinning
from kvkeep.memory.pool import ALIGNMENT_BYTES, PoolAllocator, ReleaseSignal

#: CUDA pins about so much at once, when its first slot is used: some 10 ms of work.
_PIN_STEP_BYTES = 64 << 20


class PagedAllocator(PoolAllocator):
    """Slots of one size in a range of an arena.

    Attributes:
        slot_bytes: size of a slot.
        num_slots: how many there are.
        on_fresh: called with the lock held when slots are handed out that nobody has had before;
            must not wait or call the allocator.
    """

    def __init__(
        self,
        arena: Arena,
        slot_bytes: int,
        *,
        offset: int = 0,
        size_bytes: int | None = None,
        signal: ReleaseSignal | None = None,
    ) -> None:
        """Cut [offset, offset + size_bytes) of the arena into slots.

        Args:
            arena: the memory.
            slot_bytes: size of the largest object; slots are rounded up to a multiple of 64 bytes.
            offset: start of the range in the arena, a multiple of 64.
            size_bytes: length of the range; None is up to the end of the arena. What is left after
                the last whole slot is not part of the capacity, and a range smaller than a slot has
                none.
            signal: shared with other pools whose releases wake the same waiters.

        Raises:
            ValueError: a size is not positive, or the range is not free.
        """
        if slot_bytes < 1:
            raise ValueError(f"a slot needs a positive size, got {slot_bytes}")
        if size_bytes is None:
            size_bytes = arena.size_bytes - offset
        super().__init__(arena, offset, offset + size_bytes, signal)
        self.slot_bytes = -(-slot_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.num_slots = size_bytes // self.slot_bytes
        self.on_fresh: Callable[[], None] | None = None
        self._free: list[int] = []  # offsets given back, last one first; guarded by count_lock
        self._num_fresh_used = 0  # slots below were handed out at least once; guarded by count_lock
        step_bytes = max(1, _PIN_STEP_BYTES // self.slot_bytes) * self.slot_bytes
        self._pinning = HostPinning.if_cuda(arena.array[offset : offset + size_bytes], step_bytes)

    @property
    def pinning(self) -> HostPinning | None:
        """What tells CUDA where the memory is; None without CUDA."""
        return self._pinning

    def fresh_range(self) -> tuple[int, int]:
        """Arena offsets [start, end) of the slots that no object has had yet.

        Raises:
            OwnershipError: the pool is closed.
        """
        with self.count_lock:
            if self._array is None:
                raise OwnershipError("a pool was used after it was closed")
            start = self._start + self._num_fresh_used * self.slot_bytes
            return start, self._start + self.num_slots * self.slot_bytes

    def can_ever_fit(
        self, size_bytes: int, batch_size: int = 1, fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> bool:
        """An empty pool would have room for ``batch_size`` objects of ``size_bytes``."""
        is_open = self._array is not None
        return is_open and size_bytes <= self.slot_bytes and batch_size <= self.num_slots

    def room_for(self, size_bytes: int, fmt: MemoryFormat = MemoryFormat.KV_2LTD) -> int:
        """Free slots, if ``size_bytes`` fits one; see the interface."""
        with self.count_lock:
            if self._array is None or size_bytes > self.slot_bytes:
                return 0
            return len(self._free) + self.num_slots - self._num_fresh_used

    def _take_locked(self, size_bytes: int, count: int) -> Sequence[int] | None:
        free = self._free
        num_fresh = max(0, count - len(free))
        if size_bytes > self.slot_bytes or self._num_fresh_used + num_fresh > self.num_slots:
            return None
        offsets = [free.pop() for _ in range(count - num_fresh)]
        if num_fresh:
            first = self._num_fresh_used
            self._num_fresh_used = first + num_fresh
            if self._pinning is not None:
                self._pinning.cover(self._num_fresh_used * self.slot_bytes)
            slots = range(first, first + num_fresh)
            offsets.extend(self._start + slot * self.slot_bytes for slot in slots)
            if self.on_fresh is not None:
                self.on_fresh()
        return offsets

    def _give_locked(self, offset: int) -> None:
        self._free.append(offset)

    def _usage_locked(self) -> MemoryReport:
        num_free = len(self._free) + self.num_slots - self._num_fresh_used
        return MemoryReport(
            capacity_bytes=self.num_slots * self.slot_bytes,
            used_bytes=(self.num_slots - num_free) * self.slot_bytes,
            free_bytes=num_free * self.slot_bytes,
            num_objects=len(self._living),
        )

    def _ranges_locked(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        size = self.slot_bytes
        used = [(offset, offset + size) for offset in self._living]
        free = [(offset, offset + size) for offset in self._free]
        fresh = self._start + self._num_fresh_used * size
        end = self._start + self.num_slots * size
        if fresh < end:
            free.append((fresh, end))
        return used, free

    def _close_locked(self) -> None:
        self._free.clear()
        if self._pinning is not None:
            self._pinning.close()
