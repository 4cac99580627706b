"""StoreCalls: calls to a store, each with a deadline, one retry and a breaker. In I/O threads only.

Every call can be made twice without harm, and is made a second time, within the same deadline, if
it failed for another reason than the deadline: its connection may have been an old one of a server
that has been restarted (fault 35). What fails then is counted and told to the breaker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.remote.base import Refusal, RemoteConnector, Value
from kvkeep.backends.remote.load import MISSING, ChunkLoad
from kvkeep.backends.remote.reports import TIER, RemoteReports
from kvkeep.errors import BackendError, BackendTimeoutError

R = TypeVar("R")

#: A store that was given less time, because its call had waited for a thread, is not to blame for
#: a timeout.
FAIR_S = 0.1


class StoreCalls:
    """The verbs of a connector with deadlines as values of ``time.monotonic()``.

    All raise BackendError, after they have counted it.
    """

    def __init__(self, connector: RemoteConnector, reports: RemoteReports) -> None:
        """Call ``connector``."""
        self.connector = connector
        self._reports = reports

    def sizes(self, names: Sequence[str], deadline: float, breaker: Breaker) -> list[int]:
        """Size of each value in bytes; 0 where there is none."""

        def run(timeout_s: float) -> list[int]:
            answer = self.connector.sizes(names, timeout_s)
            return _checked(answer, len(names), "sizes")

        return self._call("lookup", run, deadline, breaker)

    def get(self, loads: Sequence[ChunkLoad], deadline: float, breaker: Breaker) -> str:
        """Fill loads; returns the cause of those that are not over then.

        A call that was too slow for all of them, but not for one, is no failure of the store.
        """

        def run(timeout_s: float) -> str:
            rest = [load for load in loads if not load.is_over]
            try:
                if rest:
                    self.connector.get([load.name for load in rest], rest, timeout_s)
            except BackendTimeoutError:
                if not any(load.is_over for load in rest):
                    raise
                return "timeout"
            return MISSING

        return self._call("get", run, deadline, breaker)

    def put(
        self, names: Sequence[str], values: Sequence[Value], deadline: float, breaker: Breaker
    ) -> list[Refusal | None]:
        """Store values; None where it was done."""

        def run(timeout_s: float) -> list[Refusal | None]:
            return _checked(self.connector.put(names, values, timeout_s), len(names), "put")

        return self._call("put", run, deadline, breaker)

    def remove(self, names: Sequence[str], deadline: float) -> list[bool]:
        """Remove values; True where there was one. What can be read alone is of use, too."""

        def run(timeout_s: float) -> list[bool]:
            return _checked(self.connector.remove(names, timeout_s), len(names), "remove")

        return self._call("remove", run, deadline, Breaker())  # which nobody asks

    def ping(self, deadline: float, breaker: Breaker) -> None:
        """Ask whether the store answers."""
        self._call("ping", self.connector.ping, deadline, breaker)

    def names(self, prefix: str, timeout_s: float, breaker: Breaker) -> Iterator[str]:
        """Every name that starts with ``prefix``; never begun a second time."""
        try:
            yield from self.connector.names(prefix, timeout_s)
        except Exception as error:  # other people's code begins here
            self._reports.failed("list", error)
            breaker.failed()
            raise _as_backend_error(error, "list") from error
        breaker.succeeded()

    def _call(
        self, operation: str, run: Callable[[float], R], deadline: float, breaker: Breaker
    ) -> R:
        """The answer of ``run``, which is given the seconds that are left."""
        may_retry = True
        while True:
            timeout_s = deadline - time.monotonic()
            if timeout_s <= 0:
                error: Exception = BackendTimeoutError(
                    "there was no time left for it", backend=TIER, operation=operation
                )
                self._reports.failed(operation, error)
                raise error
            try:
                answer = run(timeout_s)
            except Exception as failure:  # other people's code begins here
                self._reports.failed(operation, failure)
                is_late = isinstance(failure, BackendTimeoutError) or time.monotonic() > deadline
                if may_retry and not is_late:
                    may_retry = False
                    continue
                if timeout_s >= FAIR_S or not is_late:
                    breaker.failed()
                raise _as_backend_error(failure, operation) from failure
            breaker.succeeded()
            return answer


def _checked(answer: list[R], count: int, operation: str) -> list[R]:
    """An answer of another length is never paired with names (faults 1, 2)."""
    if len(answer) != count:
        raise BackendError(f"{len(answer)} answers for {count}", backend=TIER, operation=operation)
    return answer


def _as_backend_error(error: Exception, operation: str) -> BackendError:
    if isinstance(error, BackendError):
        return error
    return BackendError(f"{type(error).__name__}: {error}", backend=TIER, operation=operation)
