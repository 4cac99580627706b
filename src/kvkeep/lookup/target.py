"""LookupTarget: what the lookup server needs of a CacheEngine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Protocol

from kvkeep.results import FoundTokens
from kvkeep.tokens import RequestScope


class LookupTarget(Protocol):
    """What the server needs of a CacheEngine."""

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

    def async_lookup(
        self, tokens: object, *, lookup_id: str, scope: RequestScope, counted: bool
    ) -> Future[FoundTokens]:
        """See :meth:`kvkeep.engine.CacheEngine.async_lookup`."""

    def lookup_unpin(self, lookup_id: str) -> object:
        """See :meth:`kvkeep.engine.CacheEngine.lookup_unpin`."""

    def lookup_keep(self, lookup_id: str, num_tokens: int) -> None:
        """See :meth:`kvkeep.engine.CacheEngine.lookup_keep`."""

    def check(self) -> CheckNumbers:
        """See :meth:`kvkeep.engine.CacheEngine.check`."""

    def clear(self, locations: Collection[str] | None = None) -> int:
        """See :meth:`kvkeep.engine.CacheEngine.clear`."""


class CheckNumbers(Protocol):
    """What the server reads of a CheckReport."""

    @property
    def open_leases(self) -> int:
        """Leases that no one has ended yet."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool handed out."""

    @property
    def free_bytes(self) -> int:
        """Bytes of the pool that can be handed out."""

    @property
    def capacity_bytes(self) -> int:
        """Size of the pool."""

    @property
    def num_chunks(self) -> int:
        """Chunks stored."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counters by name."""
