"""Courtesy: work in the background gives way while an engine's thread copies.

On a machine with few cores, threads that write to a disk take the processor and the memory's
bandwidth from the engine's thread, which holds up the model meanwhile. They can wait: for a moment,
and never so long that stores would not go on. Callable from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Courtesy:
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
