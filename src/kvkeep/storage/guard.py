"""BackendGuard: the one place where a backend's faults become counted misses.

The storage manager calls backends, also those of plugins, through it. Whatever they raise, and
answers that do not stand position by position, are counted, logged and replaced by an answer that
is always safe: nothing was found, nothing was stored. Callable from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvkeep.backends.base import PutOutcome, StorageBackendInterface
from kvkeep.errors import BackendError, BackendTimeoutError
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.ownership import References
from kvkeep.metrics import Metrics

T = TypeVar("T")

#: Causes of failures that are not named after the exception's class.
WRONG_ANSWER, TIMEOUT = "wrong_answer", "timeout"

_log = logging.getLogger(__name__)


class _WrongAnswerError(BackendError):
    """A backend's answer cannot be an answer to what was asked."""


class BackendGuard:
    """Calls backends and survives it."""

    def __init__(self, metrics: Metrics) -> None:
        """Count into ``metrics``."""
        self._metrics = metrics
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str, str]] = set()  # guarded by _lock

    def call(
        self,
        backend: StorageBackendInterface,
        operation: str,
        run: Callable[[], T],
        otherwise: T,
    ) -> T:
        """The result of ``run``, or ``otherwise`` if it raises.

        Args:
            backend: whose call it is.
            operation: its name in the metrics: ``"put"``, ``"get"``, ...
            run: the call.
            otherwise: what a failure counts as.
        """
        try:
            return run()
        except Exception as error:  # noqa: BLE001 - here other people's code begins
            self._count_failure(backend, operation, error)
            return otherwise

    def count(self, backend: StorageBackendInterface, asked: int, run: Callable[[], int]) -> int:
        """The answer to ``batched_contains`` for ``asked`` chunks; 0 if it cannot be right."""

        def checked() -> int:
            found = run()
            if 0 <= found <= asked:
                return found
            raise _wrong(backend, "contains", f"{found} hits for {asked} chunks")

        return self.call(backend, "contains", checked, 0)

    def outcomes(
        self,
        backend: StorageBackendInterface,
        asked: int,
        run: Callable[[], Sequence[PutOutcome]],
    ) -> list[PutOutcome] | None:
        """The answer to a put of ``asked`` chunks; None if the backend failed or lied."""

        def checked() -> list[PutOutcome]:
            answer = list(run())
            if len(answer) == asked:
                return answer
            raise _wrong(backend, "put", f"{len(answer)} outcomes for {asked} chunks")

        return self.call(backend, "put", checked, None)

    def objects(
        self,
        backend: StorageBackendInterface,
        asked: int,
        run: Callable[[], Sequence[MemoryObj | None]],
    ) -> list[MemoryObj | None]:
        """The answer to a get of ``asked`` chunks; all None if the backend failed or lied.

        An answer of another length is never paired with keys; what it holds is given back.
        """

        def checked() -> list[MemoryObj | None]:
            answer = list(run())
            if len(answer) == asked:
                return answer
            References(answer).release()
            raise _wrong(backend, "get", f"{len(answer)} objects for {asked} chunks")

        return self.call(backend, "get", checked, [None] * asked)

    def _count_failure(
        self, backend: StorageBackendInterface, operation: str, error: Exception
    ) -> None:
        """Count a failure, and log the first one of its kind as a warning."""
        cause = type(error).__name__
        if isinstance(error, (BackendTimeoutError, TimeoutError)):
            cause = TIMEOUT
        elif isinstance(error, _WrongAnswerError):
            cause = WRONG_ANSWER
        self._metrics.failure(backend.name, operation, cause)
        kind = (backend.name, operation, cause)
        with self._lock:
            level = logging.DEBUG if kind in self._seen else logging.WARNING
            self._seen.add(kind)
        fields = {"tier": backend.name, "operation": operation, "cause": cause}
        _log.log(level, "%s.%s failed: %s", backend.name, operation, error, extra=fields)


def _wrong(backend: StorageBackendInterface, operation: str, text: str) -> _WrongAnswerError:
    return _WrongAnswerError(text, backend=backend.name, operation=operation)
