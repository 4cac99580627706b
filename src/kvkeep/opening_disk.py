"""open_disk: a worker's disk tier from the settings.

Called once, by CacheManager. Settings end here; below are plain values.
"""

from __future__ import annotations

from typing import cast

from kvkeep.backends.disk.index import DiskEntry
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.backends.local_disk import DiskOptions, LocalDiskBackend
from kvkeep.codec.base import Codec
from kvkeep.config import Settings
from kvkeep.identity import CacheIdentity
from kvkeep.memory.factory import tensor_pool
from kvkeep.metrics import Metrics
from kvkeep.policy.base import CachePolicy
from kvkeep.policy.names import create_policy

#: Of the time that a lookup has, what the disk may take; the rest is for keys and the way back.
_SHARE_OF_LOOKUP = 0.7
#: Of the pool, what stores that wait for the disk may hold.
_SHARE_OF_POOL = 4


def open_disk(
    settings: Settings,
    first: LocalCPUBackend,
    identity: CacheIdentity,
    metrics: Metrics,
    *,
    codec: Codec,
) -> LocalDiskBackend | None:
    """The disk tier over the pool of ``first``, or None if the settings name no directory.

    A directory that cannot be used is no error: it is logged, counted, and tried again later.
    """
    disk = settings.disk
    if disk.path is None:
        return None
    usage = tensor_pool(first.allocator).usage()
    pool_bytes = usage.used_bytes + usage.free_bytes
    return LocalDiskBackend(
        DiskOptions(
            path=disk.path,
            size_bytes=disk.size,
            codec=codec,
            threads=disk.threads,
            queue_bytes=min(disk.queue, pool_bytes // _SHARE_OF_POOL),
            load_timeout_s=disk.load_timeout,
            lookup_timeout_s=settings.lookup.timeout * _SHARE_OF_LOOKUP,
        ),
        identity=identity,
        allocator_backend=first,
        # A policy never looks at the values that it orders.
        policy=cast("CachePolicy[DiskEntry]", create_policy(disk.policy)),
        metrics=metrics,
    )
