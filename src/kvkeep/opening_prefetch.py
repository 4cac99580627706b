"""prefetch_options: bounds of a worker's prefetches from the settings.

Called once per process, by CacheManager and by the scheduler's side. Settings end here.
"""

from __future__ import annotations

from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.config import Settings
from kvkeep.memory.factory import tensor_pool
from kvkeep.storage.prefetch import PrefetchOptions

#: Of the pool, what waiting requests may hold unless the settings say it.
_SHARE_OF_POOL = 2
#: Bytes that one lookup asks of a tier at once, in whole chunks.
_WINDOW_BYTES = 8 << 20
_MAX_WINDOW_CHUNKS = 16


def prefetches(settings: Settings) -> bool:
    """Lookups are answered later where chunks have to travel first."""
    return settings.has_slow_tier and settings.prefetch.enabled is not False


def prefetch_options(
    settings: Settings, first: LocalCPUBackend, chunk_bytes: int
) -> PrefetchOptions:
    """The bounds, for a pool that is already there.

    Args:
        settings: all settings.
        first: the tier that owns the pool.
        chunk_bytes: bytes of a chunk.
    """
    usage = tensor_pool(first.allocator).usage()
    memory_bytes = settings.prefetch.memory
    if memory_bytes is None:
        memory_bytes = (usage.used_bytes + usage.free_bytes) // _SHARE_OF_POOL
    return PrefetchOptions(
        max_chunks=max(1, memory_bytes // chunk_bytes),
        timeout_s=settings.prefetch.timeout,
        window_chunks=min(_MAX_WINDOW_CHUNKS, max(1, _WINDOW_BYTES // chunk_bytes)),
    )
