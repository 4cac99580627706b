"""Turns: how many calls run at once of a client library that spins while it waits.

Such a call keeps a core busy until it ends, so more calls than there are cores to spare take the
cores from the threads that move the bytes, and from the engine. Turns are for speed only: whoever
waits too long for one goes on without, so a call that hangs holds nobody up. Callable from any
thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Longer than a call takes in a fast network, and much shorter than any deadline.
_PATIENCE_S = 0.25


class Turns:
    """A number of turns."""

    def __init__(self, most: int, *, patience_s: float = _PATIENCE_S) -> None:
        """All are free.

        Args:
            most: calls at once.
            patience_s: whoever has waited so long, or for half of its time, goes on without.
        """
        self._free = threading.Semaphore(most)
        self._patience_s = patience_s

    @contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Wait for a turn, and have it.

        Args:
            deadline: of the call, of ``time.monotonic()``.
        """
        left_s = (deadline - time.monotonic()) / 2
        has_turn = self._free.acquire(timeout=max(0.0, min(self._patience_s, left_s)))
        try:
            yield
        finally:
            if has_turn:
                self._free.release()
