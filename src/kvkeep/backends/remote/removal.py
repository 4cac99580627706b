"""RemoteRemoval: removes values from a store, and lists them.

Callable from any thread, which waits with a deadline; the calls are made in I/O threads, in small
pieces, so that none of them runs for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from itertools import islice
from typing import TypeVar

from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.pool import IOPool
from kvkeep.backends.remote.calls import StoreCalls
from kvkeep.backends.remote.reports import TIER, RemoteReports
from kvkeep.backends.remote.value_names import key_of, value_name
from kvkeep.errors import BackendError
from kvkeep.keys import ChunkKey

R = TypeVar("R")

#: Names of one request.
_AT_ONCE = 500


class RemoteRemoval:
    """Removes and lists the values of one writer."""

    def __init__(
        self,
        calls: StoreCalls,
        prefix: str,
        *,
        pool: IOPool,
        breaker: Breaker,
        reports: RemoteReports,
        timeouts_s: tuple[float, float],
    ) -> None:
        """Remove nothing yet.

        Args:
            calls: to the store.
            prefix: of the writer's names.
            pool: where calls run.
            breaker: told how going through all does.
            reports: where late ones are counted.
            timeouts_s: of removing some chunks, and of going through all.
        """
        self._calls = calls
        self._prefix = prefix
        self._pool = pool
        self._breaker = breaker
        self._reports = reports
        self._some_s, self._all_s = timeouts_s

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks; returns how many there were, as far as the store said so in time."""
        names = iter([value_name(self._prefix, key) for key in dict.fromkeys(keys)])
        return self._remove_all(names, time.monotonic() + self._some_s, "remove")[0]

    def clear(self) -> int:
        """Remove everything.

        Raises:
            BackendError: not everything was removed.
        """
        removed, is_done = self._remove_all(self._names(), time.monotonic() + self._all_s, "clear")
        if not is_done:
            raise BackendError(f"stopped after {removed} chunks", backend=TIER, operation="clear")
        return removed

    def keys(self) -> list[ChunkKey]:
        """Every chunk."""
        deadline = time.monotonic() + self._all_s
        names, found = self._names(), set()
        while some := self._wait(lambda: list(islice(names, _AT_ONCE)), deadline, "list"):
            found.update(some)
        keys = [key_of(self._prefix, name) for name in found]
        return [key for key in keys if key is not None]

    def _remove_all(
        self, names: Iterator[str], deadline: float, operation: str
    ) -> tuple[int, bool]:
        """Remove piece by piece; how many there were, and whether all were asked for."""
        removed = 0

        def remove_some() -> int:
            """The number of values that there were; -1 at the end."""
            batch = list(islice(names, _AT_ONCE))
            if not batch:
                return -1
            return sum(self._calls.remove(batch, deadline))

        while True:
            done = self._wait(remove_some, deadline, operation)
            if done is None or done < 0:
                return removed, done is not None
            removed += done

    def _names(self) -> Iterator[str]:
        return self._calls.names(self._prefix, self._some_s, self._breaker)

    def _wait(self, run: Callable[[], R], deadline: float, operation: str) -> R | None:
        """The result of a task for an I/O thread, or None: it came too late, failed, or closed."""
        task = self._pool.load(run)
        try:
            return task.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            task.cancel()
            self._reports.fault(operation, "timeout")
        except (CancelledError, BackendError):
            pass  # counted where it was raised
        return None
