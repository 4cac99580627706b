"""A StorageManager for tests, which checks at its end that nothing leaked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    PutOutcome,
    StorageBackendInterface,
)
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.hashing import ChunkKey
from kvkeep.metrics import Metrics
from kvkeep.storage.manager import StorageManager
from kvkeep.testing.chunks import fill, make_pool

#: From the pool's backend to the lower tiers.
MakeTiers = Callable[[LocalCPUBackend], Sequence[StorageBackendInterface]]
WrapPool = Callable[[LocalCPUBackend], AllocatorBackendInterface]


def check_quiet(manager: StorageManager, pool: LocalCPUBackend) -> None:
    """No lease is open, nobody holds a chunk but the index, and used plus free is the pool."""
    assert len(manager.leases) == 0, "a lease is open"
    held = [obj for obj in pool.hot_cache.values() if obj.is_pinned or obj.ref_count != 1]
    assert not held, f"somebody still holds {held}"
    report = pool.memcheck()
    assert report.used_bytes + report.free_bytes == report.capacity_bytes
    assert report.num_objects == len(pool), "memory is used that is no chunk"


@contextmanager
def open_storage(
    make_tiers: MakeTiers = lambda pool: (),
    *,
    capacity: int = 8,
    wrap_pool: WrapPool = lambda pool: pool,
    lease_timeout_s: float = 300.0,
) -> Iterator[StorageManager]:
    """A manager with a pool of ``capacity`` chunks; at the end all must be given back.

    Args:
        make_tiers: the tiers below the pool.
        capacity: chunks that the pool has room for.
        wrap_pool: what stands for the pool in the manager.
        lease_timeout_s: of its leases.
    """
    metrics = Metrics()
    pool = make_pool(capacity, metrics)
    first = wrap_pool(pool)
    manager = StorageManager(
        [first, *make_tiers(pool)],
        allocator_backend=first,
        metrics=metrics,
        lease_timeout_s=lease_timeout_s,
    )
    yield manager
    check_quiet(manager, pool)
    pool.clear()
    assert pool.memcheck().used_bytes == 0
    manager.close()
    manager.close()


def store(manager: StorageManager, keys: Sequence[ChunkKey]) -> dict[str, list[PutOutcome]]:
    """Put chunks with the bytes that belong to their keys."""
    return manager.batched_put(keys, fill(manager.allocator_backend, keys))
