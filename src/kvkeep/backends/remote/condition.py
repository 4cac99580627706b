"""RemoteCondition: whether the store can be used now, and how it comes back by itself.

It can be out for three reasons: the tier is closed, one call has been running for too long, or
calls failed several times in a row. Stores can be out alone: the store refuses them, or has no
room. Callable from any thread; nothing here waits.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.pool import IOPool
from kvkeep.backends.remote.calls import StoreCalls
from kvkeep.errors import BackendError


class RemoteCondition:
    """Says yes or no before each call, and tries again in the background.

    Attributes:
        loads: of all calls but those that put.
        stores: of calls that put.
        refusals: open while a store that works takes nothing.
    """

    def __init__(
        self, calls: StoreCalls, pool: IOPool, *, probe_timeout_s: float, stall_timeout_s: float
    ) -> None:
        """Take it that the store works.

        Args:
            calls: to the store.
            pool: where probes run.
            probe_timeout_s: what a probe may take.
            stall_timeout_s: a call that runs for longer does not keep its deadline.
        """
        self._calls = calls
        self._pool = pool
        self.loads, self.stores, self.refusals = Breaker(), Breaker(), Breaker()
        self._probe_timeout_s = probe_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._trying: Future[bool] | Future[None] | None = None  # guarded by _lock
        self._is_closed = False  # guarded by _lock

    def open(self) -> None:
        """Try the store for the first time, in the background."""
        with self._lock:
            self._trying = self._pool.load(self._probe_first)

    def close(self) -> bool:
        """Allow nothing any more; False if it was closed already."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        return not was_closed

    @property
    def is_closed(self) -> bool:
        """Nothing is allowed any more."""
        return self._is_closed

    def why_no_loads(self) -> str | None:
        """The reason why nothing can be read now, None if it can."""
        if self._is_closed:
            return "closed"
        if self._pool.longest_running_s() > self._stall_timeout_s:
            return "stalled"
        return "failing" if self.loads.is_open else None

    def why_no_stores(self) -> str | None:
        """The reason why nothing can be put now. None while failing, too, once per pause."""
        problem = self.why_no_loads()
        if problem is not None:
            self.retry()
            return problem
        if not self.stores.allows():
            return "failing"
        return None if self.refusals.allows() else "store_refuses"

    def may_load(self) -> bool:
        """Whether loads and lookups may go to the store; if not, this may start another try."""
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
                self._trying = self._pool.load(self._probe, first=True)

    def _probe_first(self) -> None:
        """A store that does not answer at the start is left alone at once."""
        if not self._probe():
            self.loads.trip()

    def _probe(self) -> bool:
        """Ask whether the store answers; the breaker is told by the call."""
        try:
            self._calls.ping(time.monotonic() + self._probe_timeout_s, self.loads)
        except BackendError:
            return False  # it was counted
        return True
