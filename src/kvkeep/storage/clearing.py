"""Clearing: a tier that missed a clear does not take part before it has made up for it.

What was cleared may be wrong by now (the model's weights changed, say), so no tier may bring it
back: neither one that was left out when everything was removed, nor one that failed to. Callable
from any thread.
"""

from __future__ import annotations

from collections.abc import Collection

from kvkeep.backends.base import BackendHealth, StorageBackendInterface
from kvkeep.storage.guard import BackendGuard
from kvkeep.storage.tiers import Tiers


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
