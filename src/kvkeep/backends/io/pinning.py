"""pin_loaded: what a slow tier has read for a lookup becomes the lease's, and memory's.

Callable from any thread; takes the locks of the allocator backend and of the lease, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvkeep.backends.base import AllocatorBackendInterface, StorageBackendInterface
from kvkeep.backends.lease import Lease
from kvkeep.errors import BackendError
from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.batches import batched_pin, batched_unpin


def pin_loaded(
    backend: StorageBackendInterface,
    keys: Sequence[ChunkKey],
    objs: Sequence[MemoryObj],
    lease: Lease,
    *,
    allocator_backend: AllocatorBackendInterface,
    fault: Callable[[str, str], object],
) -> int:
    """Give pins on loaded objects to a lease, and the objects to the CPU tier.

    Args:
        backend: the tier that the pins are given back to.
        keys: the chunks.
        objs: their verified bytes, position by position; the references stay the caller's.
        lease: becomes the owner of the pins.
        allocator_backend: the CPU tier.
        fault: counts a failure of the CPU tier by operation and cause.

    Returns:
        How many are pinned: all, or none if the lease has ended.
    """
    try:
        allocator_backend.batched_submit_put_task(keys, objs)
    except BackendError:
        fault("promote", "allocator_backend")
    batched_pin(objs)
    if keys and not lease.add_all(backend, list(zip(keys, objs, strict=True))):
        batched_unpin(objs)
        return 0
    return len(keys)
