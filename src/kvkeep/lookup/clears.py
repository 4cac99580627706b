"""Clears: what the lookup server removes on demand, in a thread of their own.

Removing everything from a slow store takes as long as that store does, and lookups go on meanwhile.
One runs at a time, the others wait in order. One that does not end keeps one thread, and no more
are begun after it. Callable from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

#: One that runs for longer does not end: what comes after it is refused.
CLEAR_TIMEOUT_S = 120.0
#: How many wait.
MAX_WAITING = 16


class Clears:
    """Runs jobs one after the other; the thread lives as long as there are any."""

    def __init__(self) -> None:
        """Nothing is under way, and there is no thread."""
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()  # guarded by _lock
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._since = 0.0  # when the job under way began; guarded by _lock
        self._closed = False  # guarded by _lock

    def start(self, job: Callable[[], None]) -> str | None:
        """Run a job, which raises nothing, after those before it; why not, or None if it will."""
        with self._lock:
            if self._closed:
                return "the server is closing"
            if self._thread is not None and time.monotonic() - self._since > CLEAR_TIMEOUT_S:
                return f"an earlier one has not ended within {CLEAR_TIMEOUT_S:g} s"
            if len(self._waiting) >= MAX_WAITING:
                return f"{MAX_WAITING} others are waiting"
            if self._thread is None:
                thread = threading.Thread(
                    target=self._work, name="kvkeep-lookup-clear", daemon=True
                )
                try:
                    thread.start()  # it waits for the lock
                except RuntimeError as error:
                    return str(error)
                self._since = time.monotonic()
                self._thread = thread
            self._waiting.append(job)
        return None

    def close(self, timeout_s: float) -> None:
        """Drop what waits, and wait for the one under way."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                job = self._waiting.popleft()
                self._since = time.monotonic()
            job()
