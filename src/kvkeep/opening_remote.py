"""open_remote: a worker's remote tier from the settings.

Called once, by CacheManager. Settings end here; below are plain values.
"""

from __future__ import annotations

from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.backends.remote.backend import RemoteBackend, RemoteOptions
from kvkeep.backends.remote.base import HEADER_BYTES, ConnectorOptions
from kvkeep.backends.remote.known import BELIEVED_S
from kvkeep.backends.remote.names import create_connector
from kvkeep.codec.base import Codec
from kvkeep.codec.frame import ChunkMeta
from kvkeep.config import Settings
from kvkeep.config.store_url import RemoteURL
from kvkeep.gpu.base import GPUConnectorInterface
from kvkeep.identity import CacheIdentity
from kvkeep.memory.dtypes import dtype_name
from kvkeep.memory.factory import tensor_pool
from kvkeep.metrics import Metrics

#: Of the pool, what stores that wait for the store may hold.
_SHARE_OF_POOL = 4


def open_remote(
    settings: Settings,
    first: LocalCPUBackend,
    identity: CacheIdentity,
    metrics: Metrics,
    *,
    codec: Codec,
    kv: GPUConnectorInterface,
) -> RemoteBackend | None:
    """The remote tier over the pool of ``first``, or None if the settings name no store.

    A store that does not answer is no error: it is logged, counted, and tried again later.

    Args:
        settings: all settings.
        first: the CPU tier.
        identity: what the chunks belong to.
        metrics: where the tier counts.
        codec: of the tier.
        kv: says what a full chunk is.

    Raises:
        ConfigError: the URL is wrong for its kind of store.
        MissingExtraError: the store's client library is not installed.
    """
    remote = settings.remote
    if remote.url is None:
        return None
    shape, dtype, fmt = kv.chunk_shape(settings.chunk_size)
    chunk = ChunkMeta(fmt, dtype_name(dtype), tuple(shape))
    connector = create_connector(
        RemoteURL.parse(remote.url),
        ConnectorOptions(
            connections=remote.threads,
            connect_timeout_s=remote.connect_timeout,
            ttl_s=remote.ttl,
            max_value_bytes=HEADER_BYTES + chunk.size_bytes,
        ),
    )
    pool = tensor_pool(first.allocator)
    usage = pool.usage()
    connector.register(pool.arena.array.data)
    return RemoteBackend(
        connector,
        RemoteOptions(
            threads=remote.threads,
            queue_bytes=min(remote.queue, (usage.used_bytes + usage.free_bytes) // _SHARE_OF_POOL),
            load_timeout_s=remote.load_timeout,
            store_timeout_s=remote.store_timeout,
            lookup_timeout_s=settings.lookup.timeout * remote.lookup_share,
            probe_timeout_s=2 * remote.connect_timeout,
            believed_s=BELIEVED_S if remote.ttl is None else min(BELIEVED_S, remote.ttl),
        ),
        identity=identity,
        full_chunk=chunk,
        codec=codec,
        allocator_backend=first,
        metrics=metrics,
    )
