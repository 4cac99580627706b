"""TierCondition: whether a tier with I/O threads can be used now, and how it comes back by itself.

It can be out for four reasons: it is closed, it was not opened yet, one call has been running for
too long, or calls failed several times in a row. Stores can be out alone. Callable from any thread;
nothing here waits.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future

from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.pool import IOPool


class TierCondition(ABC):
    """Says yes or no before each call, and tries again in the background.

    Attributes:
        loads: of all calls but those that store.
        stores: of calls that store.
    """

    def __init__(
        self, pool: IOPool, *, breakers: tuple[Breaker, Breaker], stall_timeout_s: float
    ) -> None:
        """Nothing is tried before :meth:`open`.

        Args:
            pool: where tries run.
            breakers: of loads, and of stores.
            stall_timeout_s: a call that runs for longer means that the medium hangs.
        """
        self._pool = pool
        self.loads, self.stores = breakers
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._trying: Future[None] | None = None  # guarded by _lock
        self._is_closed = False  # guarded by _lock

    @property
    def is_open(self) -> bool:
        """The tier was opened, or needs no opening."""
        return True

    @property
    def is_closed(self) -> bool:
        """Nothing is allowed any more."""
        return self._is_closed

    @abstractmethod
    def _try_first(self) -> None:
        """Open the tier or try it; runs in an I/O thread, once, and tells the breakers."""

    @abstractmethod
    def _try_again(self) -> None:
        """Try it while loads are out; runs in an I/O thread, and tells the breakers."""

    def open(self) -> Future[None]:
        """Try the tier for the first time, in the background."""
        with self._lock:
            self._trying = self._pool.load(self._try_first)
            return self._trying

    def close(self) -> bool:
        """Allow nothing any more; False if it was closed already."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        return not was_closed

    def why_no_loads(self) -> str | None:
        """The reason why nothing can be read now, None if it can."""
        if self._is_closed:
            return "closed"
        if not self.is_open:
            return "not_open"
        if self._pool.longest_running_s() > self._stall_timeout_s:
            return "stalled"
        return "failing" if self.loads.is_open else None

    def why_no_stores(self) -> str | None:
        """The reason why nothing can be written now. None while failing, too, once per pause."""
        problem = self.why_no_loads()
        if problem is not None:
            self.retry()
            return problem
        return None if self.stores.allows() else "failing"

    def may_load(self) -> bool:
        """Whether loads and lookups may go to the tier; if not, this may start another try."""
        if self.why_no_loads() is None:
            return True
        self.retry()
        return False

    def retry(self) -> None:
        """Try again in the background, if it is time and no try is under way."""
        with self._lock:
            if self._is_closed or (self._trying is not None and not self._trying.done()):
                return
            if self.loads.is_open and self.loads.allows():
                self._trying = self._pool.load(self._try_again, first=True)
