"""CountedResets: the engine as the lookup server sees it, with a count of how often it was cleared.

Worker process only; called from the lookup server's threads, the count from the engine's.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future

from kvkeep.engine import CacheEngine, CheckReport
from kvkeep.results import FoundTokens
from kvkeep.tokens import RequestScope


class CountedResets:
    """Passes questions on to the engine."""

    def __init__(self, engine: CacheEngine) -> None:
        """Nothing was cleared yet."""
        self._engine = engine
        self._lock = threading.Lock()
        self._num_resets = 0  # guarded by _lock

    @property
    def num_resets(self) -> int:
        """How often all tiers were cleared."""
        with self._lock:
            return self._num_resets

    def lookup(
        self,
        tokens: object,
        *,
        lookup_id: str | None,
        pin: bool,
        scope: RequestScope,
        counted: bool,
    ) -> int:
        """See :meth:`kvkeep.engine.CacheEngine.lookup`."""
        return self._engine.lookup(
            tokens, lookup_id=lookup_id, pin=pin, scope=scope, counted=counted
        )

    def async_lookup(
        self, tokens: object, *, lookup_id: str, scope: RequestScope, counted: bool
    ) -> Future[FoundTokens]:
        """See :meth:`kvkeep.engine.CacheEngine.async_lookup`."""
        return self._engine.async_lookup(tokens, lookup_id=lookup_id, scope=scope, counted=counted)

    def lookup_unpin(self, lookup_id: str) -> object:
        """See :meth:`kvkeep.engine.CacheEngine.lookup_unpin`."""
        return self._engine.lookup_unpin(lookup_id)

    def lookup_keep(self, lookup_id: str, num_tokens: int) -> None:
        """See :meth:`kvkeep.engine.CacheEngine.lookup_keep`."""
        self._engine.lookup_keep(lookup_id, num_tokens)

    def check(self) -> CheckReport:
        """See :meth:`kvkeep.engine.CacheEngine.check`."""
        return self._engine.check()

    def clear(self, locations: Collection[str] | None = None) -> int:
        """See :meth:`kvkeep.engine.CacheEngine.clear`."""
        if locations is None:
            with self._lock:
                self._num_resets += 1  # first: a save that starts now must not outlive the reset
        return self._engine.clear(locations)
