"""RemoteReports: under which names the remote tier counts what happens. Callable from any thread.

The first failure of a kind is logged as a warning, the rest of them are only counted.
"""

from __future__ import annotations

import logging
import threading

from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.pool import IOPool
from kvkeep.errors import BackendTimeoutError
from kvkeep.metrics import LOAD, STORE, Metrics

TIER = "RemoteBackend"

_log = logging.getLogger(__name__)


def cause_of(error: BaseException) -> str:
    """``timeout``, or the class of the client's exception: connectors raise ``from`` it."""
    if isinstance(error, BackendTimeoutError):
        return "timeout"
    return type(error.__cause__ or error).__name__


class RemoteReports:
    """The tier's part of the metrics; one method per kind of event."""

    def __init__(self, metrics: Metrics) -> None:
        """Count into ``metrics``."""
        self._metrics = metrics
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str]] = set()  # guarded by _lock
        #: What the store said when it failed last, for people.
        self.last_error = ""

    def watch(self, pool: IOPool, loads: Breaker, stores: Breaker) -> None:
        """Read the tier's gauges from their owners."""
        self._metrics.watch_breaker(TIER, LOAD, lambda: loads.is_open)
        self._metrics.watch_breaker(TIER, STORE, lambda: stores.is_open)
        self._metrics.watch_queue(
            TIER,
            loads=lambda: pool.num_loads,
            stores=lambda: pool.num_stores,
            num_bytes=lambda: pool.queued_bytes,
        )

    def failed(self, operation: str, error: Exception) -> None:
        """A call to the store failed."""
        cause = cause_of(error)
        self.last_error = str(error)
        self.fault(operation, cause)
        with self._lock:
            is_new = (operation, cause) not in self._seen
            self._seen.add((operation, cause))
        # as text: a record that is kept would keep the error, its frames, and memory of the pool
        _log.log(logging.WARNING if is_new else logging.DEBUG, "%s: %s", operation, str(error))

    def fault(self, operation: str, cause: str) -> None:
        """Something else went wrong, or a value did not verify. A miss by itself is no fault."""
        self._metrics.failure(TIER, operation, cause)

    def dropped(self, cause: str) -> None:
        """A chunk was taken in and then not stored; only this tier can know."""
        self._metrics.dropped(TIER, cause, 1)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """A chunk was read and verified."""
        self._metrics.moved(TIER, LOAD, size_bytes, seconds)

    def stored(self, size_bytes: int, seconds: float) -> None:
        """A chunk was written."""
        self._metrics.moved(TIER, STORE, size_bytes, seconds)
