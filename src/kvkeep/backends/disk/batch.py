"""BatchLoad: the loads of one call, and the memory that they fill.

It owns a reference to every object until the caller takes it, and each load owns one more until it
has ended, so memory is never given back under a read that is still running. Use it from one thread
at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from types import TracebackType

from kvkeep.backends.disk.reader import ChunkReader
from kvkeep.backends.disk.reports import DiskReports
from kvkeep.backends.io.pool import IOPool
from kvkeep.codec.frame import ChunkMeta
from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj

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
