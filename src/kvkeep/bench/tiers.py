"""The disk tier beside plain files: the same bytes, with as many threads (spec 14.6).

Plain files are one ``write`` or ``readv`` each, with no header, no checksum and no rename. Rounds
alternate, and the middle one of each counts.

The remote tier beside its own client: the same bytes, with as many threads.

The client alone puts and gets one value per call, with no checksum and no index. What is put is
removed again.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvkeep.backends.disk.backend import DiskOptions, LocalDiskBackend
from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.backends.disk.index import DiskEntry
from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.backend import RemoteBackend, RemoteOptions
from kvkeep.backends.remote.base import HEADER_BYTES, ConnectorOptions, RemoteConnector, Value
from kvkeep.bench.measure import Row
from kvkeep.bench.rig import TierChunks
from kvkeep.codec.names import codec_of
from kvkeep.config.base import RemoteURL
from kvkeep.config.settings import RemoteSettings
from kvkeep.doctor.tiers import ReadBack
from kvkeep.errors import BackendError, ConfigError
from kvkeep.memory.base import References
from kvkeep.metrics import Metrics
from kvkeep.policy.base import CachePolicy
from kvkeep.policy.classic import LRUPolicy

#: Deadline of everything; a slow disk shows as a low rate, not as a missing chunk.
_DISK_TIMEOUT_S = 120.0
#: Spec 14.6.
_TARGET = 0.8


@dataclass(frozen=True, slots=True)
class DiskRound:
    """One round, in bytes per second; and how long a start takes for one chunk."""

    plain_written: float
    plain_read: float
    tier_written: float
    tier_read: float
    start_s: float


class DiskBench:
    """One chunk size, in one directory."""

    def __init__(self, root: Path, chunks: TierChunks, threads: int) -> None:
        """Nothing is written yet.

        Args:
            root: an empty directory; its files are removed after each round.
            chunks: what is written.
            threads: for files, of both.
        """
        self._root, self._chunks, self._threads = root, chunks, threads

    def round(self) -> DiskRound:
        """Plain files, then the tier.

        Raises:
            OSError: the disk is full, or fails.
        """
        return DiskRound(*self._plain(), *self._tier())

    def _plain(self) -> tuple[float, float]:
        folder = self._root / "plain"
        folder.mkdir()
        objs, size = self._chunks.objs, self._chunks.chunk_bytes

        def write(index: int) -> None:
            fd = os.open(folder / str(index), os.O_WRONLY | os.O_CREAT, 0o600)
            if os.write(fd, objs[index].byte_array) != size:
                raise OSError(f"a write of {size} bytes fell short")
            os.close(fd)

        with ThreadPoolExecutor(self._threads) as executor:
            started = time.perf_counter()
            list(executor.map(write, range(len(objs))))
            written = self._rate(started)
            targets = self._chunks.allocate(len(objs))

            def read(index: int) -> None:
                fd = os.open(folder / str(index), os.O_RDONLY)
                if os.readv(fd, [targets[index].byte_array]) != size:
                    raise OSError(f"a read of {size} bytes fell short")
                os.close(fd)

            started = time.perf_counter()
            list(executor.map(read, range(len(objs))))
            rates = written, self._rate(started)
        References(targets).release()
        shutil.rmtree(folder)
        return rates

    def _tier(self) -> tuple[float, float, float]:
        keys = self._chunks.keys
        disk = self._open()
        started = time.perf_counter()
        disk.batched_submit_put_task(keys, self._chunks.objs)
        if not disk.flush(_DISK_TIMEOUT_S):
            raise OSError(f"the disk took longer than {_TIMEOUT_S:g} s")
        written = self._rate(started)
        disk.close()
        started = time.perf_counter()
        disk = self._open()
        start_s = (time.perf_counter() - started) / len(keys)
        started = time.perf_counter()
        with References(disk.batched_get_blocking(keys)) as held:
            read = self._rate(started)
            if len(held.objects) != len(keys):
                raise OSError(f"{len(keys) - len(held.objects)} chunks were not read")
        disk.close()
        shutil.rmtree(self._root / "tier" / ROOT_NAME)
        return written, read, start_s

    def _open(self) -> LocalDiskBackend:
        return LocalDiskBackend(
            DiskOptions(
                self._root / "tier",
                1 << 40,
                threads=self._threads,
                queue_bytes=1 << 40,
                load_timeout_s=_DISK_TIMEOUT_S,
                stall_timeout_s=_DISK_TIMEOUT_S,
            ),
            identity=self._chunks.identity,
            allocator_backend=self._chunks.pool,
            policy=cast("CachePolicy[DiskEntry]", LRUPolicy()),
            metrics=Metrics(),
        )

    def _rate(self, started: float) -> float:
        return self._chunks.total_bytes / (time.perf_counter() - started)


def measure_disk(
    folder: Path, *, chunk_bytes: int, count: int, threads: int, rounds: int
) -> DiskRound:
    """The middle of some rounds.

    Args:
        folder: on the disk; a directory of its own is made in it, and removed.
        chunk_bytes: of a chunk.
        count: chunks.
        threads: for files.
        rounds: an odd number.

    Raises:
        OSError: the disk is full, or fails.
    """
    root = Path(tempfile.mkdtemp(prefix=".kvkeep-bench-", dir=folder))
    try:
        with TierChunks(chunk_bytes, count) as chunks:
            bench = DiskBench(root, chunks, threads)
            done = [bench.round() for _ in range(rounds)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return DiskRound(
        *(
            statistics.median(getattr(one, name) for one in done)
            for name in DiskRound.__dataclass_fields__
        )
    )


def run_disk(folder: Path, *, chunk_bytes: int, count: int, threads: int, rounds: int) -> list[Row]:
    """Rows for writing and reading; see :func:`measure_disk`."""
    found = measure_disk(
        folder, chunk_bytes=chunk_bytes, count=count, threads=threads, rounds=rounds
    )
    size = f"{chunk_bytes >> 20} MiB chunks"
    return [
        _row(f"disk: write, {size}", found.tier_written, found.plain_written),
        _row(f"disk: read, {size}", found.tier_read, found.plain_read),
    ]


def _row(what: str, ours: float, limit: float) -> Row:
    return Row(what, ours / 1e9, limit / 1e9, "GB/s", ours / limit, _TARGET)


_TIMEOUT_S = 30.0
_PINGS = 20


def run_remote(remote: RemoteSettings, *, chunk_bytes: int, count: int) -> list[Row]:
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
