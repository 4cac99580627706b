"""CacheEngine: store, load and look up the KV of prompts. One per worker (rank).

It joins a token database, a GPU connector and a storage manager. Its verbs may be called from any
thread; several may run at once, on different pages of the engine. What is broken outside (a tier, a
device) is a result and a metric; what the caller got wrong is a ValueError.

EngineControl: the verbs of a CacheEngine that concern no single request.

Health, freezing, clearing and the end of an engine. Callable from any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from concurrent.futures import Future

import torch

from kvkeep.engine.layerwise import LoadStep, retrieve_layers, store_layers
from kvkeep.engine.load import LoadOp, look_up, look_up_later, refuse_load, refuse_lookup
from kvkeep.engine.removal import Remover, TaggedKeys
from kvkeep.engine.request import EngineParts, Request, merge_scope
from kvkeep.engine.results import CheckReport, EngineHealth, FoundTokens, StoreResult, StoreStop
from kvkeep.engine.store import StoreOp, refuse_store
from kvkeep.errors import LayoutError
from kvkeep.gpu.base import GPUConnectorInterface, KVCaches
from kvkeep.gpu.threads import CopyThreads
from kvkeep.metrics import Metrics
from kvkeep.ranks.base import OTHER_RANKS, RankGroup
from kvkeep.storage.health import HealthMonitor
from kvkeep.storage.manager import StorageManager
from kvkeep.tokens import PLAIN, ChunkedTokenDatabase, RequestScope


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


__all__ = ["CacheEngine", "CheckReport", "EngineHealth", "StoreResult", "StoreStop"]


class CacheEngine(EngineControl):
    """The five verbs of the cache: store and retrieve, whole or layer by layer, and lookup.

    Attributes:
        token_database: cuts prompts into chunks and names them.
        metrics: what happened.
    """

    def __init__(
        self,
        *,
        token_database: ChunkedTokenDatabase,
        gpu_connector: GPUConnectorInterface,
        storage_manager: StorageManager,
        metrics: Metrics,
        health_timeout_s: float = 2.0,
        remove_after_retrieve: bool = False,
        ranks: RankGroup | None = None,
    ) -> None:
        """Join the parts, and own connector and storage: :meth:`close` closes them.

        Args:
            token_database: names a chunk by its whole prefix, since its KV depends on all of it.
            gpu_connector: copies between the engine's memory and the pool.
            storage_manager: the tiers.
            metrics: where everything is counted.
            health_timeout_s: a tier whose health check takes longer is unhealthy.
            remove_after_retrieve: a chunk is removed from every tier once it was loaded.
            ranks: those that load together with this one; closed with the engine. None: no others.

        Raises:
            LayoutError: the connector moves another layout than the identity names, or a chunk is
                no whole number of pages.
        """
        identity = token_database.identity
        if identity.layout != gpu_connector.layout:
            raise LayoutError(
                f"the identity names {identity.layout}, the connector moves {gpu_connector.layout}"
            )
        identity.layout.chunk_bytes(identity.chunk_size)
        parts = EngineParts(token_database, gpu_connector, storage_manager, metrics, ranks)
        super().__init__(parts, health_timeout_s=health_timeout_s)
        self.token_database = token_database
        self.metrics = metrics
        self._remover = Remover(storage_manager) if remove_after_retrieve else None

    def store(
        self,
        tokens: object,
        mask: object = None,
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
        req_id: str | None = None,
        request_configs: Mapping[str, object] | None = None,
        scope: RequestScope = PLAIN,
    ) -> StoreResult:
        """Copy the KV of full chunks out of the engine in one transfer and keep it.

        Chunks that are stored already are not copied again. Complete on return: the pages may be
        reused.

        Args:
            tokens: the prompt's token ids, see :func:`kvkeep.tokens.as_token_bytes`.
            mask: bool [tokens], False for leading tokens not to store, a multiple of the chunk
                size; None stores all.
            kvcaches: the engine's caches; None for the registered ones.
            slot_mapping: int64 [tokens - offset], the slot of each token from ``offset`` on; None
                where slot t holds token t (dense caches).
            offset: leading tokens without a slot, at most the masked ones.
            req_id: the request; stands in logs.
            request_configs: entries named ``kvkeep.tag.NAME`` are part of the identity.
            scope: what else the request adds to the identity: salt, adapter, non-text inputs.

        Raises:
            TokenError, MaskError, ValueError: the arguments are wrong; nothing was stored.
        """
        scope = merge_scope(scope, request_configs)
        request = Request(tokens, mask, kvcaches, slot_mapping, offset, req_id, scope)
        refused = self._store_refusal()
        if refused is not None:
            return refuse_store(self._parts, request, refused)
        with StoreOp(self._parts, request) as opened:
            opened.copy()
            result = opened.commit()
        self._tagged.note(request.scope.tags, opened.copied_keys)
        return result

    def store_layer(
        self,
        tokens: object,
        mask: object = None,
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
        sync: bool = True,
        req_id: str | None = None,
        request_configs: Mapping[str, object] | None = None,
        scope: RequestScope = PLAIN,
    ) -> Generator[None, None, None]:
        """Store layer by layer: a generator that the caller advances after each attention layer.

        It yields exactly num_layers + 1 times. The first ``next()`` reserves memory; ``next()``
        number i + 2 copies layer i, and the one for the last layer makes the chunks visible, all
        layers at once. A generator that is dropped earlier leaves nothing behind.

        The arguments are those of :meth:`store`, and ``sync``. True: layer i is complete when
        ``next()`` returns. False: it may still be copied while the caller computes layer i + 1, and
        its pages must not change before that ``next()``.

        Raises:
            TokenError, MaskError, ValueError: the arguments are wrong; raised by the first
                ``next()``.
        """
        scope = merge_scope(scope, request_configs)
        request = Request(tokens, mask, kvcaches, slot_mapping, offset, req_id, scope)
        behind = None if sync else self._behind
        return store_layers(self._parts, request, self._store_refusal, behind, self._tagged)

    def retrieve(
        self,
        tokens: object,
        mask: object = None,
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
        req_id: str | None = None,
        request_configs: Mapping[str, object] | None = None,
        scope: RequestScope = PLAIN,
    ) -> torch.Tensor:
        """Load the longest stored prefix into the engine's pages in one transfer.

        The lease of a lookup whose ``lookup_id`` is ``req_id`` is used up, on every path.

        Args:
            tokens: the prompt's token ids.
            mask: bool [tokens], False for leading tokens not to load, a multiple of the chunk size;
                None loads all.
            kvcaches: the engine's caches; None for the registered ones.
            slot_mapping: int64 [tokens - offset], the slot of each token from ``offset`` on.
                SKIP_SLOT (-1) for tokens whose page is not to be written; a chunk of which no token
                is to be written need not be stored. None where slot t holds token t.
            offset: leading tokens without a slot, at most the masked ones.
            req_id: the request, and the lookup whose lease it uses.
            request_configs: entries named ``kvkeep.tag.NAME`` are part of the identity.
            scope: what else the request adds to the identity.

        Returns:
            bool [tokens] on the CPU, True exactly where KV was written.

        Raises:
            TokenError, MaskError, ValueError: the arguments are wrong; nothing was written.
        """
        scope = merge_scope(scope, request_configs)
        request = Request(tokens, mask, kvcaches, slot_mapping, offset, req_id, scope)
        if not self.is_healthy():
            return refuse_load(self._parts, request)
        with LoadOp(self._parts, request) as load:
            written = load.copy()
            result = load.mask(written)
        load.settle(written, self._tagged, self._remover)
        return result

    def retrieve_layer(
        self,
        tokens: object,
        mask: object = None,
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
        req_id: str | None = None,
        request_configs: Mapping[str, object] | None = None,
        scope: RequestScope = PLAIN,
    ) -> Generator[LoadStep, None, None]:
        """Load layer by layer: while layer i is used, layer i + 1 is on its way.

        It yields exactly num_layers + 2 times: the number of tokens that were found and are to be
        loaded; None per layer, when that layer is in the engine's pages; the mask that
        :meth:`retrieve` returns. Should a copy fail, the mask is shorter than what was found.

        The arguments are those of :meth:`retrieve`.

        Raises:
            TokenError, MaskError, ValueError: the arguments are wrong; raised by the first
                ``next()``.
        """
        scope = merge_scope(scope, request_configs)
        request = Request(tokens, mask, kvcaches, slot_mapping, offset, req_id, scope)
        return retrieve_layers(self._parts, request, self.is_healthy, self._tagged, self._remover)

    def lookup(
        self,
        tokens: object,
        *,
        lookup_id: str | None = None,
        pin: bool = False,
        search_range: Collection[str] | None = None,
        request_configs: Mapping[str, object] | None = None,
        scope: RequestScope = PLAIN,
        counted: bool = True,
    ) -> int:
        """Length in tokens of the longest stored prefix.

        Args:
            tokens: the prompt's token ids.
            lookup_id: names the lease; a later lookup of the same id ends the earlier one's.
            pin: what was found can neither be evicted nor rewritten until the lease ends: by
                :meth:`retrieve` with ``req_id=lookup_id``, by :meth:`lookup_unpin` or by its
                deadline.
            search_range: names of the tiers to ask; all if None.
            request_configs: entries named ``kvkeep.tag.NAME`` are part of the identity.
            scope: what else the request adds to the identity.
            counted: part of the hit rate; False where a waiting request is asked about again.

        Raises:
            TokenError: the tokens are malformed.
            ValueError: ``pin`` without ``lookup_id``, or no tier is called so.
        """
        if pin and lookup_id is None:
            raise ValueError("a lookup that pins needs a lookup_id, or nobody can end its lease")
        chunks = self.token_database.process_tokens(
            tokens, None, merge_scope(scope, request_configs)
        )
        refused = self._lookup_refusal()
        if refused is not None:
            return refuse_lookup(self._parts, chunks, refused, counted=counted)
        lease_id = lookup_id if pin else None
        return look_up(
            self._parts, chunks, lease_id=lease_id, search_range=search_range, counted=counted
        )

    def async_lookup(
        self,
        tokens: object,
        *,
        lookup_id: str,
        search_range: Collection[str] | None = None,
        request_configs: Mapping[str, object] | None = None,
        scope: RequestScope = PLAIN,
        counted: bool = True,
    ) -> Future[FoundTokens]:
        """The same with ``pin``, answered once everything found is in memory. Never waits.

        The arguments are those of :meth:`lookup`. The future is done already where everything is in
        memory; it cannot be cancelled and never raises. :meth:`lookup_unpin` gives the lookup up at
        any time: it is answered with 0, and what arrives later goes back at once.
        """
        chunks = self.token_database.process_tokens(
            tokens, None, merge_scope(scope, request_configs)
        )
        refused = self._lookup_refusal()
        if refused is None:
            return look_up_later(
                self._parts, chunks, lookup_id, search_range=search_range, counted=counted
            )
        answer: Future[FoundTokens] = Future()
        answer.set_running_or_notify_cancel()
        answer.set_result(refuse_lookup(self._parts, chunks, refused, counted=counted))
        return answer

    def wait_for_ranks(self, timeout_s: float) -> bool:
        """Wait until all ranks are there; until then lookups find nothing. True without others."""
        ranks = self._parts.ranks
        return ranks is None or ranks.wait_until_whole(timeout_s)

    def _lookup_refusal(self) -> str | None:
        """Why lookups find nothing now, if they do."""
        if not self.is_healthy():
            return "unhealthy"
        ranks = self._parts.ranks
        return OTHER_RANKS if ranks is not None and not ranks.is_whole() else None

    def _store_refusal(self) -> StoreStop | None:
        if not self.is_healthy():
            return StoreStop.UNHEALTHY
        if self.is_passive:
            return StoreStop.PASSIVE
        return StoreStop.FROZEN if self.is_frozen() else None
