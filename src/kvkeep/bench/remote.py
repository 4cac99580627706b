"""The remote tier beside its own client: the same bytes, with as many threads.

The client alone puts and gets one value per call, with no checksum and no index. What is put is
removed again.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from kvkeep.backends.remote.backend import RemoteBackend, RemoteOptions
from kvkeep.backends.remote.base import HEADER_BYTES, ConnectorOptions, RemoteConnector, Value
from kvkeep.backends.remote.names import create_connector
from kvkeep.bench.chunks import TierChunks
from kvkeep.bench.measure import Row
from kvkeep.codec.names import codec_of
from kvkeep.config.remote import RemoteSettings
from kvkeep.config.store_url import RemoteURL
from kvkeep.doctor.remote import ReadBack
from kvkeep.errors import BackendError, ConfigError
from kvkeep.memory.ownership import References
from kvkeep.metrics import Metrics

_TIMEOUT_S = 30.0
_PINGS = 20


def run(remote: RemoteSettings, *, chunk_bytes: int, count: int) -> list[Row]:
    """Rows for a round trip, for putting and for getting.

    Args:
        remote: names the store.
        chunk_bytes: of a chunk.
        count: chunks.

    Raises:
        ConfigError: no store is named, or the URL is wrong.
        BackendError: the store failed.
        MissingExtraError: its client is not installed.
    """
    with TierChunks(chunk_bytes, count) as chunks:
        connector = _connect(remote, chunk_bytes)
        try:
            connector.ping(_TIMEOUT_S)
            ping_s = _trip(connector)
            put, got = _client(connector, chunks, remote.threads)
        finally:
            connector.close()
        tier_put, tier_got = _tier(_connect(remote, chunk_bytes), chunks, remote.threads)
    size = f"{chunk_bytes >> 20} MiB chunks"
    return [
        Row("remote: one ping", ping_s * 1e3, ping_s * 1e3, "ms", 1.0, None),
        Row(f"remote: put, {size}", tier_put / 1e9, put / 1e9, "GB/s", tier_put / put, None),
        Row(f"remote: get, {size}", tier_got / 1e9, got / 1e9, "GB/s", tier_got / got, None),
    ]


def require_store(remote: RemoteSettings) -> None:
    """Refuse a store that does not answer before the work rather than after it.

    Raises:
        ConfigError: it does not, or the URL is wrong.
        MissingExtraError: its client is not installed.
    """
    try:
        connector = _connect(remote, 0)
    except ConfigError as error:
        raise ConfigError(f"remote.url: {error}") from error
    try:
        connector.ping(2 * remote.connect_timeout)
    except BackendError as error:
        raise ConfigError(
            f"remote.url {connector.description}: {error}; start the store, mend the URL, or leave "
            "it out"
        ) from error
    finally:
        connector.close()


def _connect(remote: RemoteSettings, chunk_bytes: int) -> RemoteConnector:
    if remote.url is None:
        raise ConfigError("no store is named: set remote.url")
    return create_connector(
        RemoteURL.parse(remote.url),
        ConnectorOptions(
            connections=remote.threads,
            connect_timeout_s=remote.connect_timeout,
            ttl_s=remote.ttl,
            max_value_bytes=HEADER_BYTES + chunk_bytes,
        ),
    )


def _trip(connector: RemoteConnector) -> float:
    times = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        connector.ping(_TIMEOUT_S)
        times.append(time.perf_counter() - begin)
    return sorted(times)[_PINGS // 2]


def _client(connector: RemoteConnector, chunks: TierChunks, threads: int) -> tuple[float, float]:
    """Bytes per second put and got by the client alone."""
    names = [f"kvkeep-bench-{key.hex()}" for key in chunks.keys]
    header = bytes(HEADER_BYTES)
    sinks = [ReadBack(chunks.chunk_bytes) for _ in names]

    def put(index: int) -> None:
        value = Value(header, chunks.objs[index].byte_array)
        [refusal] = connector.put([names[index]], [value], _TIMEOUT_S)
        if refusal is not None:
            raise BackendError(f"refused: {refusal}", backend="bench", operation="put")

    def get(index: int) -> None:
        connector.get([names[index]], [sinks[index]], _TIMEOUT_S)

    with ThreadPoolExecutor(threads) as executor:
        try:
            started = time.perf_counter()
            list(executor.map(put, range(len(names))))
            put_s = time.perf_counter() - started
            started = time.perf_counter()
            list(executor.map(get, range(len(names))))
            got_s = time.perf_counter() - started
        finally:
            connector.remove(names, _TIMEOUT_S)
    if not all(sink.is_whole for sink in sinks):
        raise BackendError("a value did not come back", backend="bench", operation="get")
    return chunks.total_bytes / put_s, chunks.total_bytes / got_s


def _tier(connector: RemoteConnector, chunks: TierChunks, threads: int) -> tuple[float, float]:
    """Bytes per second put and got by the tier."""
    backend = RemoteBackend(
        connector,
        RemoteOptions(
            threads=threads,
            queue_bytes=1 << 40,
            load_timeout_s=_TIMEOUT_S,
            store_timeout_s=_TIMEOUT_S,
            lookup_timeout_s=_TIMEOUT_S,
        ),
        identity=chunks.identity,
        full_chunk=chunks.meta,
        codec=codec_of("raw"),
        allocator_backend=chunks.pool,
        metrics=Metrics(),
    )
    try:
        started = time.perf_counter()
        backend.batched_submit_put_task(chunks.keys, chunks.objs)
        if not backend.flush(_TIMEOUT_S):
            raise BackendError("puts took too long", backend="bench", operation="put")
        put_s = time.perf_counter() - started
        started = time.perf_counter()
        with References(backend.batched_get_blocking(chunks.keys)) as held:
            got_s = time.perf_counter() - started
            if len(held.objects) != len(chunks.keys):
                raise BackendError("a chunk did not come back", backend="bench", operation="get")
        backend.batched_remove(chunks.keys)
        backend.flush(_TIMEOUT_S)
    finally:
        backend.close()
    return chunks.total_bytes / put_s, chunks.total_bytes / got_s
