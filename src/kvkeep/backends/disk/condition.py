"""Condition: whether the disk tier can be used now, and how it comes back by itself.

It can be out for four reasons: it is closed, its directory could not be opened, one call has been
running for too long, or calls failed several times in a row. Stores can be out alone (a full or
read-only disk). Callable from any thread; nothing here waits.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from kvkeep.backends.disk.catalog import Catalog
from kvkeep.backends.disk.files import cause_of
from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.pool import IOPool
from kvkeep.errors import BackendError

_log = logging.getLogger(__name__)


class Condition:
    """Says yes or no before each call, and tries again in the background."""

    def __init__(
        self,
        catalog: Catalog,
        pool: IOPool,
        *,
        breakers: tuple[Breaker, Breaker],
        stall_timeout_s: float,
    ) -> None:
        """Not open yet.

        Args:
            catalog: what is opened and checked.
            pool: where that runs.
            breakers: of loads, and of stores.
            stall_timeout_s: a call that runs for longer means that the medium hangs.
        """
        self._catalog = catalog
        self._pool = pool
        self.loads, self.stores = breakers
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._trying: Future[None] | None = None  # guarded by _lock
        self._is_open = False  # written by the one task that opens
        self._is_closed = False  # guarded by _lock

    def open(self) -> Future[None]:
        """Start to open the directory."""
        with self._lock:
            self._trying = self._pool.load(self._open)
            return self._trying

    def close(self) -> bool:
        """Allow nothing any more; False if it was closed already."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        return not was_closed

    @property
    def is_open(self) -> bool:
        """The directory was opened."""
        return self._is_open

    def why_no_loads(self) -> str | None:
        """The reason why nothing can be read now, None if it can."""
        if self._is_closed:
            return "closed"
        if self._is_open and self._pool.longest_running_s() > self._stall_timeout_s:
            return "stalled"
        if not self._is_open:
            return "not_open"
        return "failing" if self.loads.is_open else None

    def why_no_stores(self) -> str | None:
        """The reason why nothing can be written now. None while failing, too, once per pause."""
        problem = self.why_no_loads()
        if problem is not None:
            self.retry()
        elif not self.stores.allows():
            problem = "failing"
        return problem

    def may_load(self) -> bool:
        """Whether loads and lookups may go to the disk; if not, this may start another try."""
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
                self._trying = self._pool.load(self._check if self._is_open else self._open)

    def _open(self) -> None:
        try:
            self._catalog.open()
        except (OSError, BackendError) as error:
            cause = cause_of(error) if isinstance(error, OSError) else "lock_timeout"
            self._catalog.reports.fault("open", cause)
            self.loads.trip()
            _log.warning("the disk tier cannot be opened: %s", error)
            return
        self._is_open = True
        self.loads.succeeded()

    def _check(self) -> None:
        try:
            self._catalog.check()
        except OSError as error:
            self._catalog.reports.fault("check", cause_of(error))
            self.loads.failed()
        else:
            self.loads.succeeded()
