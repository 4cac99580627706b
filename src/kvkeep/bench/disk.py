"""The disk tier beside plain files: the same bytes, with as many threads (spec 14.6).

Plain files are one ``write`` or ``readv`` each, with no header, no checksum and no rename. Rounds
alternate, and the middle one of each counts.
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

from kvkeep.backends.disk.index import DiskEntry
from kvkeep.backends.disk.names import ROOT_NAME
from kvkeep.backends.local_disk import DiskOptions, LocalDiskBackend
from kvkeep.bench.chunks import TierChunks
from kvkeep.bench.measure import Row
from kvkeep.memory.ownership import References
from kvkeep.metrics import Metrics
from kvkeep.policy.base import CachePolicy
from kvkeep.policy.lru import LRUPolicy

#: Deadline of everything; a slow disk shows as a low rate, not as a missing chunk.
_TIMEOUT_S = 120.0
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
        if not disk.flush(_TIMEOUT_S):
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
                load_timeout_s=_TIMEOUT_S,
                stall_timeout_s=_TIMEOUT_S,
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


def run(folder: Path, *, chunk_bytes: int, count: int, threads: int, rounds: int) -> list[Row]:
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
