"""IORuntime: the one I/O thread, whose asyncio loop drives everything that waits for slow tiers.

The thread starts with the first task. It only ever awaits: what could block is run elsewhere
(``CallThreads``), and whoever would wait for the loop's work from within it is refused,
since it would wait for itself (fault 27). ``start``, ``call_soon`` and ``close`` may be called from
any thread.

CallThreads: a few threads for calls of one tier that may block.

A tier that does not override the forms that answer with a future makes its caller wait. The I/O
thread must never wait (fault 27), so it has such calls made here. Each tier has threads of its own,
so one that hangs holds up nobody else. Callable from any thread; nothing here waits but ``close``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

_log = logging.getLogger(__name__)


class IORuntime:
    """A thread, a loop, and a bounded number of tasks."""

    def __init__(self, *, max_tasks: int, on_error: Callable[[BaseException], None]) -> None:
        """No thread yet.

        Args:
            max_tasks: tasks at once; more are refused.
            on_error: told of an exception that a task let out.
        """
        self._max_tasks = max_tasks
        self._on_error = on_error
        self._lock = threading.Lock()
        self._num_tasks = 0  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._loop: asyncio.AbstractEventLoop | None = None  # guarded by _lock
        self._tasks: set[asyncio.Task[Any]] = set()  # that have begun; of the I/O thread

    def start(self, main: Callable[[], Coroutine[None, None, None]]) -> bool:
        """Run a task; False if it is refused, because there are too many or it is closed.

        Args:
            main: makes the coroutine; called in the I/O thread.
        """
        with self._lock:
            if self._closed or self._num_tasks >= self._max_tasks:
                return False
            self._num_tasks += 1
            loop = self._loop if self._loop is not None else self._open_locked()
            loop.call_soon_threadsafe(self._begin, main)
            return True

    def call_soon(self, function: Callable[[], None]) -> bool:
        """Call a quick function in the I/O thread; False if there is none (any more).

        Takes no lock, since leases end within the garbage collector, too.
        """
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            return False
        return True

    @property
    def num_tasks(self) -> int:
        """Tasks that have not ended."""
        with self._lock:
            return self._num_tasks

    def refuse_inside(self, what: str) -> None:
        """Raise RuntimeError in the I/O thread, which must never wait for its own work."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"{what} would wait in the I/O thread for work of the I/O thread")

    def close(self, timeout_s: float) -> None:
        """Cancel every task, wait until all have ended, and end the thread.

        A second call does nothing.
        """
        with self._lock:
            self._closed = True
            thread, loop = self._thread, self._loop
        if thread is None or loop is None or not thread.is_alive():
            return
        self.call_soon(self._cancel_all)
        thread.join(timeout_s)
        if thread.is_alive():
            _log.warning("the I/O thread did not end within %g s", timeout_s)

    def _open_locked(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        self._loop = loop
        self._thread = threading.Thread(
            target=self._run, args=(loop,), name="kvkeep-io", daemon=True
        )
        self._thread.start()
        return loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread."""
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _begin(self, main: Callable[[], Coroutine[None, None, None]]) -> None:
        asyncio.ensure_future(self._enter(main)).add_done_callback(self._ended)

    async def _enter(self, main: Callable[[], Coroutine[None, None, None]]) -> None:
        """A task. It is cancelled only once it has begun, so ``main`` always gets to answer."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            if self._closed:
                task.cancel()
        await main()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with self._lock:
            self._num_tasks -= 1
            is_last = self._closed and not self._num_tasks
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
        if is_last:
            asyncio.get_running_loop().stop()

    def _cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        with self._lock:
            is_idle = not self._num_tasks
        if is_idle:
            asyncio.get_running_loop().stop()


class CallThreads:
    """Runs calls, up to ``limit`` at once; threads are started as they are needed."""

    def __init__(self, name: str, *, limit: int, stall_timeout_s: float) -> None:
        """No thread yet.

        Args:
            name: of the tier.
            limit: threads at most.
            stall_timeout_s: with every thread busy for longer than that, calls are refused.
        """
        self._name = name
        self._limit = limit
        self._stall_timeout_s = stall_timeout_s
        self._wake = threading.Condition()
        self._calls: deque[tuple[Future[None], Callable[[], None]]] = deque()  # guarded by _wake
        self._running: dict[int, float] = {}  # thread index: start of its call; guarded by _wake
        self._idle = 0  # guarded by _wake
        self._closed = False  # guarded by _wake
        self._threads: list[threading.Thread] = []  # guarded by _wake

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run a call, which must not raise; the future is cancelled if it is refused."""
        future: Future[None] = Future()
        with self._wake:
            if not self._closed and not self._is_stalled_locked():
                self._calls.append((future, call))
                if len(self._calls) > self._idle and len(self._threads) < self._limit:
                    self._start_locked()
                self._wake.notify()
                return future
        future.cancel()
        return future

    def close(self, timeout_s: float) -> None:
        """Cancel the calls that have not begun and end the threads; a second call does nothing."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._closed = True
            calls, self._calls = self._calls, deque()
            threads = list(self._threads)
            self._wake.notify_all()
        for future, _ in calls:
            future.cancel()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _is_stalled_locked(self) -> bool:
        if len(self._running) < self._limit:
            return False
        return time.monotonic() - max(self._running.values()) > self._stall_timeout_s

    def _start_locked(self) -> None:
        index = len(self._threads)
        thread = threading.Thread(
            target=self._work, args=(index,), name=f"kvkeep-{self._name}-{index}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _work(self, index: int) -> None:
        while True:
            with self._wake:
                self._running.pop(index, None)
                self._idle += 1
                self._wake.wait_for(lambda: self._calls or self._closed)
                self._idle -= 1
                if self._closed:
                    return
                future, call = self._calls.popleft()
                self._running[index] = time.monotonic()
            call()
            future.set_result(None)
            del future, call  # they may refer to memory of the pool
