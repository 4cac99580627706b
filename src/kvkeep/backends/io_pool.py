"""IOPool: a few threads for blocking I/O, with two queues, loads first.

Loads are never refused: whoever waits for one holds the memory that it goes to, which bounds them.
Stores hold memory of the pool while they wait, so their queue is bounded in bytes and a store that
does not fit is refused. One thread serves loads only, so slow stores cannot keep all threads.

WriteThrottle: work in the background gives way while an engine's thread copies.

On a machine with few cores, threads that write to a disk take the processor and the memory's
bandwidth from the engine's thread, which holds up the model meanwhile. They can wait: for a moment,
and never so long that stores would not go on. Callable from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StoreJob:
    """One chunk or several to write.

    Attributes:
        run: writes them.
        drop: called instead of ``run`` if it is shed because the pool closes.
        size_bytes: memory that they hold while they wait.
    """

    run: Callable[[], None]
    drop: Callable[[], None]
    size_bytes: int


class IOPool:
    """Threads and queues. Every method may be called from any thread and returns at once."""

    def __init__(
        self, *, name: str, threads: int, max_queued_bytes: int, on_error: Callable[[], None]
    ) -> None:
        """Start the threads.

        Args:
            name: what the threads are called: ``kvkeep-NAME-0`` and so on.
            threads: how many, at least 2; the first serves loads only.
            max_queued_bytes: most bytes of waiting stores. One store is always let in.
            on_error: called once for an exception that a store let out.
        """
        self._max_queued_bytes = max_queued_bytes
        self._on_error = on_error
        self._lock = threading.Lock()
        # Who waits is woken for what it can do only: a thread more that wakes up for each job of
        # another one costs more than the job's other calls together.
        self._for_loads = threading.Condition(self._lock)  # the first thread
        self._for_all = threading.Condition(self._lock)  # the others
        self._for_idle = threading.Condition(self._lock)  # wait_idle
        self._loads: deque[tuple[Future[Any], Callable[[], Any]]] = deque()  # guarded by _lock
        self._stores: deque[StoreJob] = deque()  # guarded by _lock
        self._queued_bytes = 0  # guarded by _lock
        self._running: dict[int, float] = {}  # thread index: start of its job; guarded by _lock
        self._closed = False  # guarded by _lock
        self._threads = [
            threading.Thread(
                target=self._work, args=(index,), name=f"kvkeep-{name}-{index}", daemon=True
            )
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, task: Callable[[], R], *, first: bool = False) -> Future[R]:
        """Run a task in the loads' queue, ahead of all others if ``first``.

        The future is cancelled if the pool is closed.
        """
        future: Future[R] = Future()
        with self._lock:
            if not self._closed:
                (self._loads.appendleft if first else self._loads.append)((future, task))
                self._for_loads.notify()
                self._for_all.notify()  # the first thread may be busy
                return future
        future.cancel()
        return future

    def store(self, job: StoreJob) -> bool:
        """Queue a store; False if the queue is full or the pool is closed."""
        with self._lock:
            full = self._stores and self._queued_bytes + job.size_bytes > self._max_queued_bytes
            if self._closed or full:
                return False
            self._stores.append(job)
            self._queued_bytes += job.size_bytes
            self._for_all.notify()
            return True

    @property
    def num_loads(self) -> int:
        """Loads that wait for a thread."""
        with self._lock:
            return len(self._loads)

    @property
    def num_stores(self) -> int:
        """Stores that wait for a thread."""
        with self._lock:
            return len(self._stores)

    @property
    def queued_bytes(self) -> int:
        """Memory that waiting stores hold."""
        with self._lock:
            return self._queued_bytes

    def longest_running_s(self) -> float:
        """For how long the oldest job that has started is running; 0.0 if none is."""
        with self._lock:
            return time.monotonic() - min(self._running.values()) if self._running else 0.0

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every queue is empty and no job runs; False if the time is over first."""
        with self._lock:
            return self._for_idle.wait_for(self._is_idle_locked, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish what is queued until the deadline, then shed the rest and end the threads."""
        deadline = time.monotonic() + timeout_s
        self.wait_idle(timeout_s)
        with self._lock:
            self._closed = True
            loads, self._loads = self._loads, deque()
            stores, self._stores = self._stores, deque()
            self._queued_bytes = 0
            for waiting in (self._for_loads, self._for_all, self._for_idle):
                waiting.notify_all()
        for job in stores:
            job.drop()
        for future, _ in loads:
            future.cancel()
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))

    def _is_idle_locked(self) -> bool:
        return not (self._loads or self._stores or self._running)

    def _work(self, index: int) -> None:
        while True:
            run = self._next(index)
            if run is None:
                return
            try:
                run()
            except Exception:  # noqa: BLE001  the top of a thread
                self._on_error()
                _log.exception("a store failed in %s", threading.current_thread().name)
            del run  # it refers to memory of the pool
            with self._lock:
                del self._running[index]
                if self._is_idle_locked():
                    self._for_idle.notify_all()

    def _next(self, index: int) -> Callable[[], None] | None:
        """The next job of this thread, None at the end. Only an idle thread waits here."""
        run: Callable[[], None]
        with self._lock:
            while True:
                if self._loads:
                    run = partial(_run_load, *self._loads.popleft())
                elif self._stores and index > 0:
                    job = self._stores.popleft()
                    self._queued_bytes -= job.size_bytes
                    run = job.run
                elif self._closed:
                    return None
                else:
                    (self._for_all if index else self._for_loads).wait()
                    continue
                self._running[index] = time.monotonic()
                return run


def _run_load(future: Future[Any], task: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = task()
    except Exception as error:  # noqa: BLE001  the top of this task: the error travels in the future
        future.set_exception(error)
    else:
        future.set_result(result)


class WriteThrottle:
    """Who is copying, and waiting until nobody is."""

    def __init__(self) -> None:
        """Nobody is."""
        self._changed = threading.Condition()
        self._num_busy = 0  # written with _changed; a look without it is a hint

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Others give way meanwhile."""
        with self._changed:
            self._num_busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_busy -= 1
                if not self._num_busy:
                    self._changed.notify_all()

    def give_way(self, limit_s: float) -> float:
        """Wait until nobody is busy, at most ``limit_s``; returns how long it was."""
        if not self._num_busy or limit_s <= 0:
            return 0.0
        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_busy, limit_s)
        return time.monotonic() - started
