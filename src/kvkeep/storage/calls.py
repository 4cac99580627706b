"""CallThreads: a few threads for calls of one tier that may block.

A tier that does not override the forms that answer with a future makes its caller wait. The I/O
thread must never wait (fault 27), so it has such calls made here. Each tier has threads of its own,
so one that hangs holds up nobody else. Callable from any thread; nothing here waits but ``close``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future


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
