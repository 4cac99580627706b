"""DiskReports: under which names the disk tier counts what happens. Callable from any thread."""

from __future__ import annotations

from kvkeep.backends.disk.index import DiskIndex
from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.pool import IOPool
from kvkeep.metrics import LOAD, STORE, Metrics

TIER = "LocalDiskBackend"


class DiskReports:
    """The tier's part of the metrics; one method per kind of event."""

    def __init__(self, metrics: Metrics) -> None:
        """Count into ``metrics``."""
        self._metrics = metrics

    def watch(self, index: DiskIndex, pool: IOPool, breakers: tuple[Breaker, Breaker]) -> None:
        """Read the tier's gauges from their owners; the breakers are of loads, and of stores."""
        loads, stores = breakers
        self._metrics.watch_chunks(TIER, lambda: float(len(index)))
        self._metrics.watch_breaker(TIER, LOAD, lambda: loads.is_open)
        self._metrics.watch_breaker(TIER, STORE, lambda: stores.is_open)
        self._metrics.watch_queue(
            TIER,
            loads=lambda: pool.num_loads,
            stores=lambda: pool.num_stores,
            num_bytes=lambda: pool.queued_bytes,
        )

    def fault(self, operation: str, cause: str) -> None:
        """A call failed, or something on the disk did not verify. A miss by itself is no fault."""
        self._metrics.failure(TIER, operation, cause)

    def refused(self, cause: str) -> None:
        """A put was turned away at the door; the caller counts the chunks that it lost."""
        self._metrics.failure(TIER, "put", cause)

    def dropped(self, cause: str) -> None:
        """A chunk was taken in and then not stored; only this tier can know."""
        self._metrics.dropped(TIER, cause, 1)

    def evicted(self) -> None:
        """The policy gave a chunk up."""
        self._metrics.evicted(TIER, 1)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """A chunk was read and verified."""
        self._metrics.moved(TIER, LOAD, size_bytes, seconds)

    def stored(self, size_bytes: int, seconds: float) -> None:
        """A chunk was written."""
        self._metrics.moved(TIER, STORE, size_bytes, seconds)
