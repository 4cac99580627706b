"""PoolAllocator: what all allocators of one arena range share, apart from where an object goes.

Counts of living objects, waiting for releases, closing and the proof that all bytes are accounted
for stand here; a subclass says how ranges are found and given back.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.errors import OwnershipError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import (
    MemoryAllocatorInterface,
    MemoryObj,
    MemoryObjMetadata,
    MemoryReport,
)

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
