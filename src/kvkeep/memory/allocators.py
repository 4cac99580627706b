"""PoolAllocator: what all allocators of one arena range share, apart from where an object goes.

Counts of living objects, waiting for releases, closing and the proof that all bytes are accounted
for stand here; a subclass says how ranges are found and given back.

PagedAllocator: equal slots, each for one object of any shape that fits.

Every operation is O(1) per object. A slot that was given back is handed out again first, since its
memory is committed and warm; a slot that was never used comes last, in the order of the offsets, so
that a pool that is not full commits no more than it needs.

GeneralAllocator: objects of any size, best fit, free neighbours joined.

Every operation is O(log n) in the number of free ranges. The smallest free range that is large
enough is used, the lowest one among equals. No two free ranges touch.

MixedMemoryAllocator: a pool for KV tensors and one for byte buffers behind one interface.

Objects of the format BINARY come from the second pool, all others from the first. The two share one
lock and one signal, so who waits for memory is woken by a release in either.

PagedCpuGpuMemoryAllocator: equal slots that other machines' network cards can address.

For transfers between nodes a pool is registered once, as one range; after that a slot is named by
its number. So slots are whole memory pages, lie without gaps, and never move. Objects of every
format take slots of this one pool.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from sortedcontainers import SortedList

from kvkeep.errors import OwnershipError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.arena import Arena, HostPinning
from kvkeep.memory.base import MemoryAllocatorInterface, MemoryObj, MemoryObjMetadata, MemoryReport

#: Objects start at multiples of it: a cache line, and enough for every dtype.
ALIGNMENT_BYTES = 64


class ReleaseSignal:
    """The lock of one or several pools, and the means to wait for a release in any of them."""

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may close an abandoned generator, which gives its
        # references back, at any moment, also while this thread holds the lock.
        self.lock = threading.RLock()
        self.count = 0  # guarded by lock
        self._waiters = 0  # guarded by lock
        self._released = threading.Condition(self.lock)

    def ring_locked(self) -> None:
        """Something was released."""
        self.count += 1
        if self._waiters:
            self._released.notify_all()

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Wait until ``count`` differs from ``seen``; False if the time is over first."""
        with self.lock:
            self._waiters += 1
            try:
                return self._released.wait_for(lambda: self.count != seen, timeout_s)
            finally:
                self._waiters -= 1


class PoolAllocator(MemoryAllocatorInterface):
    """Hands out memory objects from a range of an arena."""

    def __init__(self, arena: Arena, start: int, end: int, signal: ReleaseSignal | None) -> None:
        """Claim [start, end) of ``arena``.

        Raises:
            ValueError: the range is not free or not aligned.
        """
        if start % ALIGNMENT_BYTES:
            raise ValueError(f"a pool starts at a multiple of {ALIGNMENT_BYTES} bytes, not {start}")
        arena.claim(start, end)
        self._array: npt.NDArray[np.uint8] | None = arena.array  # guarded by count_lock
        self._arena = arena
        self._start = start
        self.signal = signal if signal is not None else ReleaseSignal()
        self.count_lock = self.signal.lock
        self._living: dict[int, MemoryObj] = {}  # by offset; guarded by count_lock
        self._ended: list[MemoryObj] = []  # out of use, not yet taken back; guarded by count_lock
        self._is_busy = False  # the lists are being changed or walked; guarded by count_lock

    @property
    def arena(self) -> Arena:
        """Where the memory is."""
        return self._arena

    @abstractmethod
    def _take_locked(self, size_bytes: int, count: int) -> Sequence[int] | None:
        """Arena offsets of ``count`` ranges for ``size_bytes``; None, and nothing is taken."""

    @abstractmethod
    def _give_locked(self, offset: int) -> None:
        """Take the range at ``offset`` back."""

    @abstractmethod
    def _usage_locked(self) -> MemoryReport:
        """The counters."""

    @abstractmethod
    def _ranges_locked(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """All ranges [start, end) of the arena handed out, and all that are free, in any order."""

    @final
    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> MemoryObj | None:
        """One object with one reference, or None if there is no room now. See the interface."""
        objects = self.batched_allocate(shape, dtype, 1, fmt)
        return objects[0] if objects else None

    @final
    def batched_allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
    ) -> list[MemoryObj] | None:
        """``batch_size`` objects of one shape, or None if there is no room for all of them.

        Raises:
            ValueError: the shape has no or a negative size, or the batch is negative.
        """
        metadata = describe(shape, dtype, fmt)
        if batch_size < 0:
            raise ValueError(f"a batch of {batch_size} objects cannot be allocated")
        objects: list[MemoryObj] = []
        with self.count_lock:
            array = self._array
            if array is None:
                return None
            self._is_busy = True
            try:
                offsets = self._take_locked(metadata.size_bytes, batch_size)
            finally:
                self._settle_locked()
            if offsets is None:
                return None
            for offset in offsets:
                obj = MemoryObj(self, offset, array, metadata)
                self._living[offset] = obj
                objects.append(obj)
        return objects

    @final
    def note_release_locked(self, ended: MemoryObj | None) -> None:
        """Called by MemoryObj alone; see the interface."""
        if ended is not None:
            self._ended.append(ended)
            if not self._is_busy:
                self._settle_locked()
        self.signal.ring_locked()

    def _settle_locked(self) -> None:
        """Take the memory of objects back that are out of use."""
        self._is_busy = True
        try:
            while self._ended:
                offset = self._ended.pop().offset
                del self._living[offset]
                if self._array is not None:
                    self._give_locked(offset)
        finally:
            self._is_busy = False

    @contextlib.contextmanager
    def _busy_locked(self) -> Iterator[None]:
        """Objects that go out of use meanwhile, in this thread, are taken back at the end."""
        self._is_busy = True
        try:
            yield
        finally:
            self._settle_locked()

    @property
    def release_count(self) -> int:
        """Number of releases so far, in all pools that share the signal."""
        return self.signal.count

    def wait_for_release(self, seen: int, timeout_s: float) -> bool:
        """Wait until ``release_count`` differs from ``seen``; False if the time is over first."""
        return self.signal.wait(seen, timeout_s)

    def usage(self) -> MemoryReport:
        """The figures of :meth:`memcheck` from counters, in constant time and without proof."""
        with self.count_lock:
            if self._array is None:
                return MemoryReport(0, 0, 0, len(self._living))
            return self._usage_locked()

    def memcheck(self) -> MemoryReport:
        """Prove that the objects and the free ranges are the whole pool, and that none overlap.

        Walks all of them with the lock held, a few seconds for a million. A closed pool has no
        bytes; its objects that were not released are still counted.

        Raises:
            OwnershipError: an object or a free range is where it must not be; the message says
                where.
        """
        with self.count_lock, self._busy_locked():
            array = self._array
            if array is None:
                return MemoryReport(0, 0, 0, len(self._living))
            report = self._usage_locked()
            used, free = self._ranges_locked()
            self._check_objects_locked(array, dict(used))
        _check_cover(used, free, self._start, report)
        return report

    def _check_objects_locked(self, array: npt.NDArray[np.uint8], used: dict[int, int]) -> None:
        if self._living.keys() != used.keys():
            lost = sorted(self._living.keys() ^ used.keys())[:8]
            raise OwnershipError(f"objects and ranges handed out differ at the offsets {lost}")
        base = _address(array)
        for offset, obj in self._living.items():
            if obj in self._ended:  # just now, by the garbage collector
                continue
            if not obj.is_alive or obj.ref_count + obj.pin_count < 1:
                raise OwnershipError(f"{obj!r} is listed as alive and nobody holds it")
            if obj.offset != offset or _address(obj.array) != base + offset:
                raise OwnershipError(f"{obj!r} is not where it was allocated, at {offset}")
            if obj.size_bytes != obj.array.size or offset + obj.size_bytes > used[offset]:
                raise OwnershipError(f"{obj!r} is larger than its range, up to {used[offset]}")

    def close(self) -> None:
        """Give the pool back; see the interface."""
        with self.count_lock:
            if self._array is None:
                return
            with self._busy_locked():
                self._array = None
                for obj in self._living.values():
                    obj.invalidate_locked()
                self._close_locked()
            self.signal.ring_locked()
        self._arena.give_back(self._start)

    def _close_locked(self) -> None:
        """Forget the free ranges, undo what the subclass did to the memory."""


def describe(shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat) -> MemoryObjMetadata:
    """The metadata of an object of this shape.

    Raises:
        ValueError: the shape has no or a negative size.
    """
    num_elements = 1
    for size in shape:
        if size < 1:
            raise ValueError(f"memory of shape {tuple(shape)} cannot be allocated")
        num_elements *= size
    if not len(shape):
        raise ValueError("memory needs a shape with at least one dimension")
    return MemoryObjMetadata(tuple(shape), dtype, fmt, num_elements * dtype.itemsize)


def _address(array: npt.NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _check_cover(
    used: Iterable[tuple[int, int]],
    free: Iterable[tuple[int, int]],
    start: int,
    report: MemoryReport,
) -> None:
    """Every byte of the pool is in exactly one range, and the counters say so too."""
    used_bytes = free_bytes = 0
    position = start
    for range_start, range_end, is_used in sorted(
        [(a, b, True) for a, b in used] + [(a, b, False) for a, b in free]
    ):
        if range_start != position or range_end <= range_start:
            kind = "overlaps" if range_start < position else "leaves a gap after"
            raise OwnershipError(f"[{range_start}, {range_end}) {kind} offset {position}")
        position = range_end
        if is_used:
            used_bytes += range_end - range_start
        else:
            free_bytes += range_end - range_start
    if position - start != report.capacity_bytes:
        raise OwnershipError(
            f"used and free ranges are {position - start} bytes of {report.capacity_bytes}"
        )
    if (used_bytes, free_bytes) != (report.used_bytes, report.free_bytes):
        raise OwnershipError(
            f"counted {used_bytes} used and {free_bytes} free bytes, expected {report}"
        )


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


class MixedMemoryAllocator(MemoryAllocatorInterface):
    """Chooses the pool by the format."""

    def __init__(self, tensor_allocator: PoolAllocator, buffer_allocator: PoolAllocator) -> None:
        """Join two pools and own them.

        Raises:
            ValueError: they were not made with the same ``signal``.
        """
        if tensor_allocator.signal is not buffer_allocator.signal:
            raise ValueError("the pools of a MixedMemoryAllocator need one common ReleaseSignal")
        self.tensor_allocator = tensor_allocator
        self.buffer_allocator = buffer_allocator
        self.count_lock = tensor_allocator.count_lock

    def _pool(self, fmt: MemoryFormat) -> PoolAllocator:
        return self.buffer_allocator if fmt is MemoryFormat.BINARY else self.tensor_allocator

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> MemoryObj | None:
        """One object from the pool of its format; see the interface."""
        return self._pool(fmt).allocate(shape, dtype, fmt)

    def batched_allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
    ) -> list[MemoryObj] | None:
        """All or none, from the pool of their format; see the interface."""
        return self._pool(fmt).batched_allocate(shape, dtype, batch_size, fmt)

    def note_release_locked(self, ended: MemoryObj | None) -> None:
        """Never called with an object: each belongs to one of the two pools."""
        self.tensor_allocator.note_release_locked(ended)

    @property
    def release_count(self) -> int:
        """Number of releases so far in both pools."""
        return self.tensor_allocator.release_count

    def wait_for_release(self, seen: int, timeout_s: float) -> bool:
        """Wait until something is released in either pool; see the interface."""
        return self.tensor_allocator.wait_for_release(seen, timeout_s)

    def can_ever_fit(
        self, size_bytes: int, batch_size: int = 1, fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> bool:
        """An empty pool of this format would have room for them."""
        return self._pool(fmt).can_ever_fit(size_bytes, batch_size, fmt)

    def room_for(self, size_bytes: int, fmt: MemoryFormat = MemoryFormat.KV_2LTD) -> int:
        """How many more objects fit into the pool of this format now; see the interface."""
        return self._pool(fmt).room_for(size_bytes, fmt)

    def usage(self) -> MemoryReport:
        """Both pools together."""
        return _sum(self.tensor_allocator.usage(), self.buffer_allocator.usage())

    def memcheck(self) -> MemoryReport:
        """Prove both pools and return their sum.

        They cannot overlap each other, since an arena gives a range to one allocator only.
        """
        return _sum(self.tensor_allocator.memcheck(), self.buffer_allocator.memcheck())

    def close(self) -> None:
        """Close both pools."""
        self.tensor_allocator.close()
        self.buffer_allocator.close()


def _sum(first: MemoryReport, second: MemoryReport) -> MemoryReport:
    return MemoryReport(
        capacity_bytes=first.capacity_bytes + second.capacity_bytes,
        used_bytes=first.used_bytes + second.used_bytes,
        free_bytes=first.free_bytes + second.free_bytes,
        num_objects=first.num_objects + second.num_objects,
    )


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
