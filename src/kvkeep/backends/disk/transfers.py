"""DiskLoads: allocates memory for chunks and has them read into it.

The synchronous forms are called by the engine's threads, which wait with a deadline; the
asynchronous one waits nowhere. Every object that is not handed out is given back on every path.

BatchLoad: the loads of one call, and the memory that they fill.

It owns a reference to every object until the caller takes it, and each load owns one more until it
has ended, so memory is never given back under a read that is still running. Use it from one thread
at a time.

DiskStores: the queue of chunks to write.

A queued chunk has an invisible entry in the index and holds a reference to its memory; both end
with the store, whatever becomes of it (fault 23). Callable from any thread; nothing here waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType

from kvkeep.backends.base import AllocatorBackendInterface, PutOutcome
from kvkeep.backends.disk.chunk_files import ChunkReader, ChunkWriter, Pending
from kvkeep.backends.disk.index import DiskIndex, DiskReports
from kvkeep.backends.disk.ledger import LEDGER_BYTES, blocks
from kvkeep.backends.io_pool import IOPool, StoreJob
from kvkeep.codec.frame import HEADER_BYTES, ChunkMeta
from kvkeep.hashing import ChunkKey
from kvkeep.memory.base import MemoryObj, References, dtype_from_name, dtype_name

_log = logging.getLogger(__name__)


class BatchLoad:
    """Starts loads at positions, and gives the loaded objects out position by position."""

    def __init__(self, pool: IOPool, reader: ChunkReader, reports: DiskReports) -> None:
        """No loads yet.

        Args:
            pool: where they run.
            reader: what runs.
            reports: where late and broken loads are counted.
        """
        self._pool = pool
        self._reader = reader
        self._reports = reports
        self._loads: dict[int, tuple[MemoryObj, Future[bool]]] = {}
        self._stamp_ns = time.time_ns()

    def start(self, position: int, key: ChunkKey, meta: ChunkMeta, obj: MemoryObj) -> None:
        """Queue a load.

        Args:
            position: of the chunk in the caller's list; a prefix counts as used after its suffix.
            key: the chunk.
            meta: what it is.
            obj: memory for it; the caller's reference is this object's from now on.
        """
        obj.ref_count_up()
        used_ns = self._stamp_ns - position
        future = self._pool.load(lambda: self._reader.load(key, meta, obj.byte_array, used_ns))
        future.add_done_callback(lambda _: obj.ref_count_down())
        self._loads[position] = (obj, future)

    def take(self, position: int, deadline: float) -> MemoryObj | None:
        """The object at a position, with one reference for the caller, once it is loaded.

        Args:
            position: as in :meth:`start`; one that was never started is None.
            deadline: value of ``time.monotonic()`` until which to wait.
        """
        obj, future = self._loads.pop(position, (None, None))
        if obj is None or future is None:
            return None
        loaded = False
        try:
            loaded = future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self._reports.fault("get", "timeout")
            future.cancel()
        except CancelledError:
            self._reports.fault("get", "closed")
        except Exception:  # noqa: BLE001  the task of another thread ends here: it is counted and a miss
            self._reports.fault("get", "internal")
            _log.exception("a load of the disk tier failed")
        if loaded:
            return obj
        obj.ref_count_down()
        return None

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once, when every load that was started has ended; at once if there is none."""
        lock = threading.Lock()
        waiting = len(self._loads)

        def one_ended(_: object) -> None:
            nonlocal waiting
            with lock:
                waiting -= 1
                last = waiting == 0
            if last:
                callback()

        if not self._loads:
            callback()
        for _, future in list(self._loads.values()):
            future.add_done_callback(one_ended)

    def release(self) -> None:
        """Give back what was not taken. Loads not begun are cancelled."""
        loads, self._loads = self._loads, {}
        for obj, future in loads.values():
            future.cancel()
            obj.ref_count_down()

    def __enter__(self) -> BatchLoad:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


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
