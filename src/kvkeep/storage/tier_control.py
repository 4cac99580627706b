"""TierControl: the storage manager's part that says which tiers take part. For any thread."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

from kvkeep.backends.base import BackendHealth
from kvkeep.storage.clearing import Clearing
from kvkeep.storage.guard import BackendGuard
from kvkeep.storage.tiers import Tiers


class TierControl:
    """Freezes, bypasses, asks after health, and holds background work back."""

    def __init__(self, tiers: Tiers, clearing: Clearing, guard: BackendGuard) -> None:
        """Control ``tiers``, which are called through ``guard``."""
        self._tiers = tiers
        self._clearing = clearing
        self._guard = guard

    def set_frozen(self, frozen: bool) -> None:
        """Frozen: nothing is put, and only the allocator's own tier is searched and read."""
        self._tiers.frozen = frozen

    def is_frozen(self) -> bool:
        """Whether it is frozen."""
        return self._tiers.frozen

    def set_bypassed(self, name: str, bypassed: bool) -> None:
        """Leave a tier out of everything, or take it back in; ValueError if there is none of it.

        Its pins on memory are still given back when their leases end.
        """
        self._tiers.set_bypassed(name, bypassed)

    @property
    def bypassed(self) -> frozenset[str]:
        """Names of the tiers that are left out."""
        return self._tiers.bypassed

    def backend_health(self, name: str) -> BackendHealth:
        """A tier's opinion of itself; one that raises is unhealthy. Takes as long as the tier does.

        Raises:
            ValueError: there is no such tier.
        """
        self._tiers.check_names([name])
        return self._clearing.health(name)

    def make_way(self) -> ExitStack:
        """Until what is returned is closed, tiers hold back what they store in the background.

        For the time in which the engine waits for a copy: both would share processor and memory.
        """
        with ExitStack() as held:
            for backend in self._tiers.active():
                held.enter_context(
                    self._guard.call(backend, "make_way", backend.make_way, nullcontext())
                )
            return held.pop_all()
