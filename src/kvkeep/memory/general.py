"""GeneralAllocator: objects of any size, best fit, free neighbours joined.

Every operation is O(log n) in the number of free ranges. The smallest free range that is large
enough is used, the lowest one among equals. No two free ranges touch.
"""

from __future__ import annotations

from collections.abc import Sequence

from sortedcontainers import SortedList

from kvkeep.layout import MemoryFormat
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import MemoryReport
from kvkeep.memory.pool import ALIGNMENT_BYTES, PoolAllocator, ReleaseSignal


class GeneralAllocator(PoolAllocator):
    """Ranges of any size in a range of an arena."""

    def __init__(
        self,
        arena: Arena,
        *,
        align: int = ALIGNMENT_BYTES,
        offset: int = 0,
        size_bytes: int | None = None,
        signal: ReleaseSignal | None = None,
    ) -> None:
        """Manage [offset, offset + size_bytes) of the arena.

        Args:
            arena: the memory.
            align: objects take a multiple of it, and start at one relative to ``offset``; a
                multiple of 64 bytes.
            offset: start of the range in the arena, a multiple of 64.
            size_bytes: length of the range; None is up to the end of the arena. What is left after
                the last multiple of ``align`` is not part of the capacity.
            signal: shared with other pools whose releases wake the same waiters.

        Raises:
            ValueError: a size or the alignment is wrong, or the range is not free.
        """
        if align < 1 or align % ALIGNMENT_BYTES:
            raise ValueError(f"objects align to a multiple of {ALIGNMENT_BYTES} bytes, not {align}")
        if size_bytes is None:
            size_bytes = arena.size_bytes - offset
        super().__init__(arena, offset, offset + size_bytes, signal)
        self._align = align
        self._capacity_bytes = size_bytes // align * align
        self._free_bytes = 0  # guarded by count_lock
        self._used: dict[int, int] = {}  # start -> end; guarded by count_lock
        self._free_by_start: dict[int, int] = {}  # start -> end; guarded by count_lock
        self._free_by_end: dict[int, int] = {}  # end -> start; guarded by count_lock
        self._free_by_size: SortedList[tuple[int, int]] = SortedList()  # (size, start); count_lock
        if self._capacity_bytes:
            self._add_free_locked(offset, offset + self._capacity_bytes)

    def can_ever_fit(
        self, size_bytes: int, batch_size: int = 1, fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> bool:
        """An empty pool would have room for ``batch_size`` objects of ``size_bytes``."""
        needed = self._rounded(size_bytes) * batch_size
        return self._array is not None and needed <= self._capacity_bytes

    def room_for(self, size_bytes: int, fmt: MemoryFormat = MemoryFormat.KV_2LTD) -> int:
        """Free bytes divided by what an object takes; see the interface."""
        with self.count_lock:
            return self._free_bytes // self._rounded(size_bytes) if self._array is not None else 0

    def _rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self._align) * self._align

    def _take_locked(self, size_bytes: int, count: int) -> Sequence[int] | None:
        size = self._rounded(size_bytes)
        if size * count > self._free_bytes:
            return None
        offsets: list[int] = []
        for _ in range(count):
            index = self._free_by_size.bisect_left((size, -1))
            if index == len(self._free_by_size):
                for offset in offsets:
                    self._give_locked(offset)
                return None
            _, start = self._free_by_size[index]
            end = self._remove_free_locked(start)
            if start + size < end:
                self._add_free_locked(start + size, end)
            self._used[start] = start + size
            offsets.append(start)
        return offsets

    def _give_locked(self, offset: int) -> None:
        start, end = offset, self._used.pop(offset)
        if start in self._free_by_end:
            start = self._free_by_end[start]
            self._remove_free_locked(start)
        if end in self._free_by_start:
            end = self._remove_free_locked(end)
        self._add_free_locked(start, end)

    def _add_free_locked(self, start: int, end: int) -> None:
        self._free_by_start[start] = end
        self._free_by_end[end] = start
        self._free_by_size.add((end - start, start))
        self._free_bytes += end - start

    def _remove_free_locked(self, start: int) -> int:
        end = self._free_by_start.pop(start)
        del self._free_by_end[end]
        self._free_by_size.remove((end - start, start))
        self._free_bytes -= end - start
        return end

    def _usage_locked(self) -> MemoryReport:
        return MemoryReport(
            capacity_bytes=self._capacity_bytes,
            used_bytes=self._capacity_bytes - self._free_bytes,
            free_bytes=self._free_bytes,
            num_objects=len(self._living),
        )

    def _ranges_locked(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        return list(self._used.items()), list(self._free_by_start.items())

    def _close_locked(self) -> None:
        self._used.clear()
        self._free_by_start.clear()
        self._free_by_end.clear()
        self._free_by_size.clear()
