"""MixedMemoryAllocator: a pool for KV tensors and one for byte buffers behind one interface.

Objects of the format BINARY come from the second pool, all others from the first. The two share one
lock and one signal, so who waits for memory is woken by a release in either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryAllocatorInterface, MemoryObj, MemoryReport
from kvkeep.memory.pool import PoolAllocator


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
