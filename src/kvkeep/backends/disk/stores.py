"""DiskStores: the queue of chunks to write.

A queued chunk has an invisible entry in the index and holds a reference to its memory; both end
with the store, whatever becomes of it (fault 23). Callable from any thread; nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvkeep.backends.base import PutOutcome
from kvkeep.backends.disk.index import DiskIndex
from kvkeep.backends.disk.ledger import LEDGER_BYTES, blocks
from kvkeep.backends.disk.reports import DiskReports
from kvkeep.backends.disk.writer import ChunkWriter, Pending
from kvkeep.backends.io.pool import IOPool, StoreJob
from kvkeep.codec.frame import HEADER_BYTES, ChunkMeta
from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.dtypes import dtype_name


class DiskStores:
    """Queues chunks, or says why not."""

    def __init__(
        self,
        writer: ChunkWriter,
        index: DiskIndex,
        *,
        pool: IOPool,
        reports: DiskReports,
        budget_bytes: int,
    ) -> None:
        """Nothing is queued yet.

        Args:
            writer: what a store does.
            index: where it becomes visible.
            pool: where it runs.
            reports: where drops are counted.
            budget_bytes: of the directory; a chunk that could never fit is refused at once.
        """
        self._writer = writer
        self._index = index
        self._pool = pool
        self._reports = reports
        self._budget_bytes = budget_bytes

    def submit(
        self,
        keys: Sequence[ChunkKey],
        objs: Sequence[MemoryObj],
        on_complete: Callable[[ChunkKey], None] | None,
    ) -> list[PutOutcome]:
        """Queue a batch. Once the queue is full the rest of the batch is dropped, too.

        Args:
            keys: the chunks, a prefix before its suffix.
            objs: their bytes.
            on_complete: called by an I/O thread, without a lock, for each chunk that became
                readable.
        """
        made = self._index.begin(
            (key, ChunkMeta(obj.metadata.fmt, dtype_name(obj.metadata.dtype), obj.metadata.shape))
            for key, obj in zip(keys, objs, strict=True)
            if self._fits(obj)
        )
        now_ns, full = time.time_ns(), False
        outcomes: list[PutOutcome] = []
        for position, (key, obj) in enumerate(zip(keys, objs, strict=True)):
            entry = made.pop(key, None)
            if entry is None:
                outcomes.append(PutOutcome.PRESENT if self._fits(obj) else self._too_large())
                continue
            pending = Pending(key, entry, obj.byte_array, now_ns - position)
            full = full or not self._queue(pending, obj, on_complete)
            if full:
                self._index.forget(key, entry)
                self._reports.refused("queue_full")
            outcomes.append(PutOutcome.DROPPED if full else PutOutcome.STORED)
        return outcomes

    def _queue(
        self, pending: Pending, obj: MemoryObj, on_complete: Callable[[ChunkKey], None] | None
    ) -> bool:
        """Queue one store, which holds a reference to its memory until it has ended."""
        obj.ref_count_up()

        def run() -> None:
            try:
                stored = self._writer.store(pending)
            finally:
                obj.ref_count_down()
            if stored and on_complete is not None:
                on_complete(pending.key)

        def drop() -> None:
            self._index.forget(pending.key, pending.entry)
            self._reports.dropped("closed")
            obj.ref_count_down()

        if self._pool.store(StoreJob(run, drop, obj.size_bytes)):
            return True
        obj.ref_count_down()
        return False

    def _fits(self, obj: MemoryObj) -> bool:
        needed = LEDGER_BYTES + blocks(HEADER_BYTES + obj.size_bytes)
        return needed <= self._budget_bytes

    def _too_large(self) -> PutOutcome:
        self._reports.refused("too_large")
        return PutOutcome.NO_ROOM
