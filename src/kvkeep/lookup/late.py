"""LateAnswers: answers that are ready after their question was put aside, on their way out.

Any thread may add one. The server's thread takes them; a file descriptor that it polls wakes it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from kvkeep.lookup.messages import Reply


class LateAnswers:
    """A queue that can be polled."""

    def __init__(self) -> None:
        """Empty and open."""
        self._lock = threading.Lock()
        self._ready: deque[tuple[bytes, Reply]] = deque()  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._wake_recv, self._wake_send = os.pipe()
        os.set_blocking(self._wake_recv, False)
        os.set_blocking(self._wake_send, False)

    def fileno(self) -> int:
        """Readable while there are answers."""
        return self._wake_recv

    def add(self, client: bytes, reply: Reply) -> None:
        """An answer for a client; nothing once this is closed."""
        with self._lock:
            if not self._closed:
                self._ready.append((client, reply))
                with contextlib.suppress(BlockingIOError):  # then it is readable already
                    os.write(self._wake_send, b"\0")

    def take(self) -> list[tuple[bytes, Reply]]:
        """All answers so far, in the order in which they came."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                while not self._closed and os.read(self._wake_recv, 4096):
                    pass
            ready, self._ready = list(self._ready), deque()
        return ready

    def close(self) -> None:
        """Drop what is there and what still comes."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._ready.clear()
                os.close(self._wake_recv)
                os.close(self._wake_send)
