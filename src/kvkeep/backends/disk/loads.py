"""DiskLoads: allocates memory for chunks and has them read into it.

The synchronous forms are called by the engine's threads, which wait with a deadline; the
asynchronous one waits nowhere. Every object that is not handed out is given back on every path.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

from kvkeep.backends.base import AllocatorBackendInterface
from kvkeep.backends.disk.batch import BatchLoad
from kvkeep.backends.disk.index import DiskIndex
from kvkeep.backends.disk.reader import ChunkReader
from kvkeep.backends.disk.reports import DiskReports
from kvkeep.backends.io.pool import IOPool
from kvkeep.codec.frame import ChunkMeta
from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.dtypes import dtype_from_name
from kvkeep.memory.ownership import References

_log = logging.getLogger(__name__)


class DiskLoads:
    """Loads of chunks that the index knows."""

    def __init__(
        self,
        allocator_backend: AllocatorBackendInterface,
        index: DiskIndex,
        *,
        pool: IOPool,
        reader: ChunkReader,
        reports: DiskReports,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            allocator_backend: where memory comes from.
            index: what is on the disk.
            pool: where loads run.
            reader: what they do.
            reports: where failures are counted.
        """
        self._allocator_backend = allocator_backend
        self._index = index
        self._pool = pool
        self._reader = reader
        self._reports = reports

    def load_run(self, keys: Sequence[ChunkKey], deadline: float) -> References:
        """The longest run from the first key on that is in memory, verified, by the deadline.

        What the CPU tier has is not read again. Never waits for memory: the run ends where there is
        none.
        """
        held = References()
        there = self._allocator_backend.batched_get_blocking(keys)
        with References(there), self._batch() as batch:
            for position, key in enumerate(keys):
                if there[position] is not None:
                    continue
                meta = self._index.find(key)
                if meta is None or not (objs := self._allocate_what_fits(meta, 1, keys)):
                    break
                batch.start(position, key, meta, objs[0])
            for position, kept in enumerate(there):
                obj = kept if kept is not None else batch.take(position, deadline)
                if obj is None:
                    break
                if kept is not None:
                    kept.ref_count_up()
                held.adopt([obj])
        return held

    def load_all(self, keys: Sequence[ChunkKey], deadline: float) -> list[MemoryObj | None]:
        """Every chunk that is read and verified by the deadline, at its position."""
        with self._batch() as batch:
            self._start(keys, batch, wait=True)
            return self._collect(keys, batch, deadline)

    def load_later(self, keys: Sequence[ChunkKey], answer: Future[list[MemoryObj | None]]) -> None:
        """The same without waiting: ``answer`` gets the result when the last load has ended."""
        batch = self._batch()
        try:
            self._start(keys, batch, wait=False)
        except Exception:  # noqa: BLE001  the top of this task: it is counted, and the rest misses
            self._reports.fault("get", "internal")
            _log.exception("a load of the disk tier failed")
        batch.when_done(lambda: answer.set_result(self._collect(keys, batch, time.monotonic())))

    def _start(self, keys: Sequence[ChunkKey], batch: BatchLoad, *, wait: bool) -> None:
        """Allocate for every chunk that is there and start its load.

        Room for all chunks of one kind is taken at once or not at all, and only for the most
        frequent kind does it wait: nothing is held while it waits (fault 26). If there is no room
        for all, the first ones that fit are loaded.
        """
        kinds: dict[ChunkMeta, list[int]] = {}
        for position, key in enumerate(keys):
            meta = self._index.find(key)
            if meta is not None:
                kinds.setdefault(meta, []).append(position)
        for meta, positions in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
            objs = self._allocate(meta, len(positions), keys, wait=wait)
            wait = False
            if objs is None:
                objs = self._allocate_what_fits(meta, len(positions), keys)
            for position, obj in zip(positions, objs, strict=False):
                batch.start(position, keys[position], meta, obj)

    def _collect(
        self, keys: Sequence[ChunkKey], batch: BatchLoad, deadline: float
    ) -> list[MemoryObj | None]:
        objs = [batch.take(position, deadline) for position in range(len(keys))]
        self._index.note_use([key for key, obj in zip(keys, objs, strict=True) if obj is not None])
        return objs

    def _allocate(
        self, meta: ChunkMeta, count: int, keys: Sequence[ChunkKey], *, wait: bool
    ) -> list[MemoryObj] | None:
        """Memory for ``count`` chunks, without evicting those of the same prompt (``keys``)."""
        return self._allocator_backend.batched_allocate(
            meta.shape,
            dtype_from_name(meta.dtype),
            count,
            meta.fmt,
            busy_loop=wait,
            protect=keys,
        )

    def _allocate_what_fits(
        self, meta: ChunkMeta, count: int, keys: Sequence[ChunkKey]
    ) -> list[MemoryObj]:
        objs: list[MemoryObj] = []
        while len(objs) < count:
            one = self._allocate(meta, 1, keys, wait=False)
            if one is None:
                self._reports.fault("get", "no_memory")
                break
            objs += one
        return objs

    def _batch(self) -> BatchLoad:
        return BatchLoad(self._pool, self._reader, self._reports)
