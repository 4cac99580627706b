"""PoolAccess: the storage manager's part that hands out memory of the pool.

Callable from any thread. Faults of the allocator backend are counted and count as no room.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch

from kvkeep.backends.base import AllocatorBackendInterface
from kvkeep.keys import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj, MemoryReport
from kvkeep.storage.guard import BackendGuard
from kvkeep.storage.transfer import allocate_most, copy_objects


class PoolAccess:
    """Allocates from the allocator backend.

    Attributes:
        allocator_backend: whose memory all chunks travel in.
    """

    def __init__(self, allocator_backend: AllocatorBackendInterface, guard: BackendGuard) -> None:
        """Hand out memory of ``allocator_backend``, called through ``guard``."""
        self.allocator_backend = allocator_backend
        self._guard = guard

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """One object; see :meth:`batched_allocate`."""
        objs = self.batched_allocate(shape, dtype, 1, fmt, eviction=eviction, busy_loop=busy_loop)
        return objs[0] if objs else None

    def batched_allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        eviction: bool = True,
        busy_loop: bool = True,
        protect: Collection[ChunkKey] = (),
    ) -> list[MemoryObj] | None:
        """``batch_size`` objects of one shape, all or none.

        See :meth:`kvkeep.backends.base.AllocatorBackendInterface.batched_allocate`. A failure of
        the allocator backend is no room.

        Raises:
            ValueError: the shape has no size.
        """
        if batch_size < 0 or not shape or min(shape) < 1:
            raise ValueError(f"cannot allocate {batch_size} objects of shape {tuple(shape)}")
        run = partial(self.allocator_backend.batched_allocate, shape, dtype, batch_size, fmt)
        run = partial(run, eviction=eviction, busy_loop=busy_loop, protect=protect)
        return self._guard.call(self.allocator_backend, "allocate", run, None)

    def allocate_prefix(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        wanted: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        protect: Collection[ChunkKey] = (),
    ) -> list[MemoryObj]:
        """As many of ``wanted`` objects as there is room for, without waiting.

        All are asked for at once, and only if that fails for fewer. As little as needed is evicted.

        Args:
            shape: of one object.
            dtype: element type.
            wanted: how many.
            fmt: arrangement.
            protect: chunks of the same prompt, so that a suffix never evicts its own prefix.
        """
        return allocate_most(
            wanted,
            lambda count: self.batched_allocate(
                shape, dtype, count, fmt, busy_loop=False, protect=protect
            ),
        )

    def allocate_and_copy_objects(
        self, backend: AllocatorBackendInterface, objs: Sequence[MemoryObj]
    ) -> list[MemoryObj]:
        """Copies of ``objs`` in the memory of ``backend``, as many from the first on as fit."""
        return copy_objects(backend, objs)

    def memcheck(self) -> MemoryReport:
        """Prove the allocator backend's pool; raises OwnershipError if it is not sound."""
        return self.allocator_backend.memcheck()
