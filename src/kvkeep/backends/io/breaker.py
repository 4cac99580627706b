"""Breaker: leaves a failing medium alone for a while, then tries it once.

Callable from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_THRESHOLD = 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0


class Breaker:
    """Opens after some failures in a row; the next success closes it.

    While it is open, one attempt is allowed after each pause, and the pauses grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """A closed one.

        Args:
            clock: seconds that only grow.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # guarded by _lock
        self._pause_s = _FIRST_PAUSE_S  # guarded by _lock
        self._retry_at = 0.0  # guarded by _lock

    @property
    def is_open(self) -> bool:
        """The last attempts failed."""
        return self._failures >= _THRESHOLD

    def allows(self) -> bool:
        """An attempt may be made now. While open, True once per pause."""
        with self._lock:
            if self._failures < _THRESHOLD:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._pause_s
            return True

    def succeeded(self) -> None:
        """An attempt worked."""
        if self._failures:
            with self._lock:
                self._failures = 0
                self._pause_s = _FIRST_PAUSE_S

    def failed(self) -> None:
        """An attempt failed."""
        with self._lock:
            self._failures += 1
            if self._failures >= _THRESHOLD:
                self._retry_at = self._clock() + self._pause_s
                self._pause_s = min(self._pause_s * 2, _LAST_PAUSE_S)

    def trip(self) -> None:
        """Open at once: the medium cannot be used at all."""
        with self._lock:
            self._failures = max(self._failures, _THRESHOLD - 1)
        self.failed()
