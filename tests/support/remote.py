"""Remote tiers for tests, over any store, with the small chunks of the contract.

Callable from any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvkeep.backends.base import AllocatorBackendInterface
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.backend import RemoteBackend, RemoteOptions
from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    ConnectorOptions,
    Refusal,
    RemoteConnector,
    Value,
    ValueSink,
    name_prefix,
    value_name,
)
from kvkeep.codec.frame import ChunkMeta, writer_digest
from kvkeep.codec.names import codec_of
from kvkeep.config.base import RemoteURL
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.hashing import ChunkKey
from kvkeep.identity import CacheIdentity
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import dtype_name
from kvkeep.memory.factory import tensor_pool
from kvkeep.metrics import Metrics
from kvkeep.testing.chunks import CAPACITY, CHUNK_BYTES, DTYPE, SHAPE
from support.disk import IDENTITY
from support.paged_engine import PagedEngine

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
        _registered(make_connector(store) if isinstance(store, str) else store, pool),
        replace(OPTIONS, **options),  # type: ignore[arg-type]
        identity=identity,
        full_chunk=FULL_CHUNK,
        codec=codec_of(codec),
        allocator_backend=pool,
        metrics=metrics if metrics is not None else Metrics(),
    )


def rig_remote(
    store: str | RemoteConnector, *, chunk_size: int = 8, metrics: Metrics, **options: int | float
) -> Callable[[AllocatorBackendInterface], RemoteBackend]:
    """Makes the remote tier of an EngineRig with 3 layers, whose own metrics it does not share."""
    layout = PagedEngine(num_pages=1, num_layers=3).layout
    shape, dtype, fmt = PagedGPUConnector(layout).chunk_shape(chunk_size)
    connector = store
    if isinstance(connector, str):
        full_bytes = HEADER_BYTES + layout.chunk_bytes(chunk_size)
        connector = make_connector(connector, max_value_bytes=full_bytes)
    chosen = replace(OPTIONS, queue_bytes=16 * layout.chunk_bytes(chunk_size))
    return lambda pool: RemoteBackend(
        _registered(connector, pool),
        replace(chosen, **options),  # type: ignore[arg-type]
        identity=CacheIdentity("rig", "1", layout, chunk_size=chunk_size),
        full_chunk=ChunkMeta(fmt, dtype_name(dtype), tuple(shape)),
        codec=codec_of("raw"),
        allocator_backend=pool,
        metrics=metrics,
    )


def _registered(connector: RemoteConnector, pool: AllocatorBackendInterface) -> RemoteConnector:
    """The connector, told of the memory that it will be given."""
    if isinstance(pool, LocalCPUBackend):
        connector.register(tensor_pool(pool.allocator).arena.array.data)
    return connector


def name_of(key: ChunkKey, identity: CacheIdentity = IDENTITY) -> str:
    """The name of a chunk's value in the store."""
    return value_name(name_prefix(writer_digest(identity)), key)


class StubbornConnector(RemoteConnector):
    """A connector with faults: ``before`` is called with the operation ahead of every real call.

    It may raise, or wait; ``change`` may exchange an answer for another one.
    """

    def __init__(self, inner: RemoteConnector) -> None:
        """Without faults it behaves as the one that it wraps."""
        self.inner = inner
        self.description = inner.description
        self.before: Callable[[str], None] = lambda operation: None
        self.change: Callable[[str, list[Any]], list[Any]] = lambda operation, answer: answer
        self.calls: Counter[str] = Counter()

    def _note(self, operation: str) -> None:
        self.calls[operation] += 1
        self.before(operation)

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int]:
        """See the interface."""
        self._note("sizes")
        return self.change("sizes", self.inner.sizes(names, timeout_s))

    def put(
        self, names: Sequence[str], values: Sequence[Value], timeout_s: float
    ) -> list[Refusal | None]:
        """See the interface."""
        self._note("put")
        return self.change("put", self.inner.put(names, values, timeout_s))

    def get(self, names: Sequence[str], sinks: Sequence[ValueSink], timeout_s: float) -> None:
        """See the interface."""
        self._note("get")
        self.inner.get(names, sinks, timeout_s)
        self.change("get", [])

    def remove(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """See the interface."""
        self._note("remove")
        return self.change("remove", self.inner.remove(names, timeout_s))

    def names(self, prefix: str, timeout_s: float) -> Iterator[str]:
        """See the interface."""
        self._note("names")
        return self.inner.names(prefix, timeout_s)

    def ping(self, timeout_s: float) -> None:
        """See the interface."""
        self._note("ping")
        self.inner.ping(timeout_s)

    def close(self) -> None:
        """See the interface."""
        self._note("close")
        self.inner.close()
