"""EngineControl: the verbs of a CacheEngine that concern no single request.

Health, freezing, clearing and the end of an engine. Callable from any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvkeep.gpu.threads import CopyThreads
from kvkeep.removing import Remover
from kvkeep.request import EngineParts, merge_scope
from kvkeep.results import CheckReport, EngineHealth
from kvkeep.storage.health import HealthMonitor
from kvkeep.tagged_keys import TaggedKeys
from kvkeep.tokens import PLAIN


class EngineControl:
    """Owner of an engine's parts."""

    _remover: Remover | None = None

    def __init__(self, parts: EngineParts, *, health_timeout_s: float) -> None:
        """Own the parts.

        Args:
            parts: what the engine joins.
            health_timeout_s: a tier whose health check takes longer is unhealthy.
        """
        storage = parts.storage_manager
        self._parts = parts
        self._storage = storage
        self._connector = parts.gpu_connector
        self._monitor = HealthMonitor(storage, timeout_s=health_timeout_s)
        self._tagged = TaggedKeys(lambda key: storage.contains(key) is not None)
        self._behind = CopyThreads(1)
        self._is_healthy = True
        self._is_closed = False

    def lookup_unpin(self, lookup_id: str) -> bool:
        """Give a lookup up, or end its lease; False if there is neither (any more)."""
        return self._storage.batched_unpin(lookup_id)

    def lookup_keep(self, lookup_id: str, num_tokens: int) -> None:
        """Give back what the lease of a lookup holds beyond the chunks of the first tokens."""
        size = self._parts.token_database.identity.chunk_size
        self._storage.keep_first(lookup_id, -(-num_tokens // size))

    def freeze(self, frozen: bool) -> None:
        """Frozen: nothing is stored any more, and only the CPU tier is read."""
        self._storage.set_frozen(frozen)

    def is_frozen(self) -> bool:
        """Nothing is stored any more."""
        return self._storage.is_frozen()

    @property
    def is_passive(self) -> bool:
        """Another rank stores, whose KV is the same."""
        return self._parts.ranks is not None and self._parts.ranks.is_passive

    def is_healthy(self) -> bool:
        """False: the verbs do nothing and say so. Known from the last :meth:`health`."""
        return self._is_healthy and not self._is_closed

    def health(self) -> EngineHealth:
        """Ask every tier, bypass those that are unhealthy, take those back that have recovered.

        A tier that has not answered within ``health_timeout_s`` is unhealthy. The engine is healthy
        as long as the tier whose memory it uses is.
        """
        backends = self._monitor.check_once()
        own = backends.get(self._storage.allocator_backend.name)
        self._is_healthy = own is None or own.healthy
        return EngineHealth(self.is_healthy(), self.is_frozen(), backends)

    def clear(
        self,
        locations: Collection[str] | None = None,
        request_configs: Mapping[str, object] | None = None,
    ) -> int:
        """Remove chunks; those that are in use go when their last reader is done.

        Args:
            locations: names of the tiers; all if None.
            request_configs: only chunks that this engine has stored or loaded under exactly the
                ``kvkeep.tag.NAME`` entries in it; None or without such entries: all chunks.

        Returns:
            How many copies there were.

        Raises:
            ValueError: no tier is called so.
        """
        tags = merge_scope(PLAIN, request_configs).tags
        if tags:
            keys = self._tagged.of(tags) if locations is not None else self._tagged.take(tags)
            return self._storage.batched_remove(keys, locations)
        if locations is None:
            self._tagged.forget_all()
        return self._storage.clear(locations)

    def check(self) -> CheckReport:
        """Prove the pool sound and say what is held.

        Raises:
            OwnershipError: used and free memory are not the whole pool, or objects overlap.
        """
        return CheckReport.of(self._storage)

    def close(self) -> None:
        """End all leases and copies, leave the other ranks, close connector and tiers.

        Later calls do nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._behind.close()
        if self._remover is not None:
            self._remover.close()
        if self._parts.ranks is not None:
            self._parts.ranks.close()
        self._connector.close()
        self._storage.close()
