"""Tiers: which backends there are, in which order, and which of them take part now.

Callable from any thread.

BackendGuard: the one place where a backend's faults become counted misses.

The storage manager calls backends, also those of plugins, through it. Whatever they raise, and
answers that do not stand position by position, are counted, logged and replaced by an answer that
is always safe: nothing was found, nothing was stored. Callable from any thread.

Clearing: a tier that missed a clear does not take part before it has made up for it.

What was cleared may be wrong by now (the model's weights changed, say), so no tier may bring it
back: neither one that was left out when everything was removed, nor one that failed to. Callable
from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    BackendHealth,
    PutOutcome,
    StorageBackendInterface,
)
from kvkeep.errors import BackendError, BackendTimeoutError
from kvkeep.memory.base import MemoryObj, References
from kvkeep.metrics import Metrics


class Tiers:
    """Backends in order of priority."""

    def __init__(
        self,
        backends: Sequence[StorageBackendInterface],
        allocator_backend: AllocatorBackendInterface,
    ) -> None:
        """All take part at first. ``first`` is the tier in whose memory chunks are loaded.

        Args:
            backends: in order of priority.
            allocator_backend: the one that is still read when the tiers are frozen.

        Raises:
            ValueError: two backends have one name.
        """
        self.backends: OrderedDict[str, StorageBackendInterface] = OrderedDict(
            (backend.name, backend) for backend in backends
        )
        if len(self.backends) != len(backends):
            raise ValueError(f"names of tiers repeat: {[backend.name for backend in backends]}")
        self.frozen = False
        self._unhealthy: frozenset[str] = frozenset()  # written with _lock
        self._owing: frozenset[str] = frozenset()  # written with _lock
        self._in_clear: frozenset[str] = frozenset()  # written with _lock
        self.first = allocator_backend
        self._lock = threading.Lock()
        self.clear_lock = threading.Lock()
        """Held from looking at ``num_clears`` to having put chunks into the first tier."""
        self.num_clears = 0
        """How often everything was removed; written with ``clear_lock``."""

    def set_bypassed(self, name: str, bypassed: bool) -> None:
        """Leave a tier out, or take it back in.

        Raises:
            ValueError: there is no tier of this name.
        """
        self.check_names([name])
        with self._lock:
            self._unhealthy = self._unhealthy | {name} if bypassed else self._unhealthy - {name}

    def set_owing(self, name: str, owing: bool) -> None:
        """Note that a tier has to be cleared before it takes part again, or has been.

        Raises:
            ValueError: there is no tier of this name.
        """
        self.check_names([name])
        with self._lock:
            self._owing = self._owing | {name} if owing else self._owing - {name}

    def set_in_clear(self, name: str, in_clear: bool) -> None:
        """Note that a tier is being cleared: nothing is found in it or put into it meanwhile.

        Raises:
            ValueError: there is no tier of this name.
        """
        self.check_names([name])
        with self._lock:
            self._in_clear = self._in_clear | {name} if in_clear else self._in_clear - {name}

    def note_clear(self) -> None:
        """Everything is about to be removed: nothing asked for before may come into the first."""
        with self.clear_lock:
            self.num_clears += 1

    def is_owing(self, name: str) -> bool:
        """The tier has to be cleared before it takes part again."""
        return name in self._owing

    @property
    def bypassed(self) -> frozenset[str]:
        """Names of the tiers that are left out now."""
        return self._unhealthy | self._owing

    def is_bypassed(self, name: str) -> bool:
        """The tier is left out now."""
        return name in self.bypassed

    def check_names(self, names: Collection[str]) -> None:
        """Raise ValueError if one of these is no tier's name."""
        for name in names:
            if name not in self.backends:
                known = ", ".join(self.backends)
                raise ValueError(f"no tier is called {name!r}; there are: {known}")

    def active(self, names: Collection[str] | None = None) -> list[StorageBackendInterface]:
        """The tiers that are neither bypassed nor being cleared, in order.

        Args:
            names: only these; all if None.

        Raises:
            ValueError: one of ``names`` does not exist.
        """
        if names is not None:
            self.check_names(names)
        left_out = self.bypassed | self._in_clear
        return [
            backend
            for name, backend in self.backends.items()
            if name not in left_out and (names is None or name in names)
        ]

    def readable(self, names: Collection[str] | None = None) -> list[StorageBackendInterface]:
        """The active tiers that may be searched and read: when frozen, the allocator's own only."""
        tiers = self.active(names)
        if self.frozen:
            return [backend for backend in tiers if backend is self.first]
        return tiers


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


class Clearing:
    """Clears tiers, and has those that missed it make up for it when they are healthy again."""

    def __init__(self, tiers: Tiers, guard: BackendGuard) -> None:
        """Clear ``tiers``; a tier that raises has failed."""
        self._tiers = tiers
        self._guard = guard

    def clear(self, names: Collection[str] | None) -> int:
        """Clear every tier or those named; returns how many chunks there were.

        A tier that is left out now is not called, and owes it. The first one is cleared at once,
        and again after the others, for what was read of those meanwhile; the others take part in
        nothing until they are cleared. What was asked for until then and arrives later does not
        get in.

        Raises:
            ValueError: there is no such tier.
        """
        active = self._tiers.active(names)
        called = {backend.name for backend in active}
        for name in self._tiers.backends if names is None else names:
            if name not in called:
                self._tiers.set_owing(name, True)
        own = [backend for backend in active if backend is self._tiers.first]
        lower = [backend for backend in reversed(active) if backend not in own]
        removed = 0
        try:
            for backend in lower:
                self._tiers.set_in_clear(backend.name, True)
            for backend in [*own, *lower, *(own if lower else [])]:
                self._tiers.note_clear()
                removed += self._clear(backend) or 0
                self._tiers.set_in_clear(backend.name, False)
        finally:
            for backend in lower:  # whatever came in between: none stays out for good
                self._tiers.set_in_clear(backend.name, False)
        return removed

    def health(self, name: str) -> BackendHealth:
        """A tier's opinion of itself, once it owes nothing; one that raises is unhealthy."""
        backend = self._tiers.backends[name]
        failed = BackendHealth(False, "its health check failed")
        answer = self._guard.call(backend, "health", backend.health, failed)
        if answer.healthy and self._tiers.is_owing(name) and self._clear(backend) is None:
            return BackendHealth(False, "it could not be cleared")
        return answer

    def _clear(self, backend: StorageBackendInterface) -> int | None:
        """The number of chunks that there were; None if it fails, and then it owes it."""
        count: int | None = self._guard.call(backend, "clear", backend.clear, None)
        self._tiers.set_owing(backend.name, count is None)
        return count
