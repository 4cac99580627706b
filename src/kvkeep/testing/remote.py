"""Remote tiers for tests, over any store, with the small chunks of the contract.

Callable from any thread.
"""

from __future__ import annotations

from dataclasses import replace

from kvkeep.backends.base import AllocatorBackendInterface
from kvkeep.backends.remote.backend import RemoteBackend, RemoteOptions
from kvkeep.backends.remote.base import HEADER_BYTES, ConnectorOptions, RemoteConnector
from kvkeep.backends.remote.names import create_connector
from kvkeep.backends.remote.value_names import name_prefix, value_name
from kvkeep.codec.frame import ChunkMeta, writer_digest
from kvkeep.codec.names import codec_of
from kvkeep.config.store_url import RemoteURL
from kvkeep.identity import CacheIdentity
from kvkeep.keys import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.dtypes import dtype_name
from kvkeep.metrics import Metrics
from kvkeep.testing.chunks import CAPACITY, CHUNK_BYTES, DTYPE, SHAPE
from kvkeep.testing.disk import IDENTITY

#: What a chunk of the contract is.
FULL_CHUNK = ChunkMeta(MemoryFormat.OPAQUE_PAGES, dtype_name(DTYPE), SHAPE)
#: Deadlines that a busy machine keeps, and that a test can wait for.
OPTIONS = RemoteOptions(
    threads=3,
    # stores that wait hold memory of the contract's small pool
    queue_bytes=CAPACITY * CHUNK_BYTES // 4,
    load_timeout_s=5.0,
    store_timeout_s=5.0,
    lookup_timeout_s=5.0,
    probe_timeout_s=2.0,
    clear_timeout_s=20.0,
    close_timeout_s=10.0,
)


def make_connector(url: str, **options: int | float) -> RemoteConnector:
    """A connector; ``options`` are fields of ConnectorOptions."""
    chosen = ConnectorOptions(
        connections=3, connect_timeout_s=2.0, max_value_bytes=HEADER_BYTES + CHUNK_BYTES
    )
    return create_connector(RemoteURL.parse(url), replace(chosen, **options))  # type: ignore[arg-type]


def make_remote(
    pool: AllocatorBackendInterface,
    store: str | RemoteConnector,
    *,
    metrics: Metrics | None = None,
    identity: CacheIdentity = IDENTITY,
    codec: str = "raw",
    **options: int | float,
) -> RemoteBackend:
    """A remote tier over a URL or a connector; ``options`` are fields of RemoteOptions."""
    return RemoteBackend(
        make_connector(store) if isinstance(store, str) else store,
        replace(OPTIONS, **options),  # type: ignore[arg-type]
        identity=identity,
        full_chunk=FULL_CHUNK,
        codec=codec_of(codec),
        allocator_backend=pool,
        metrics=metrics if metrics is not None else Metrics(),
    )


def name_of(key: ChunkKey, identity: CacheIdentity = IDENTITY) -> str:
    """The name of a chunk's value in the store."""
    return value_name(name_prefix(writer_digest(identity)), key)
