"""CacheEngine: store, load and look up the KV of prompts. One per worker (rank).

It joins a token database, a GPU connector and a storage manager. Its verbs may be called from any
thread; several may run at once, on different pages of the engine. What is broken outside (a tier, a
device) is a result and a metric; what the caller got wrong is a ValueError.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from concurrent.futures import Future

import torch

from kvkeep.engine_control import EngineControl
from kvkeep.errors import LayoutError
from kvkeep.gpu.base import GPUConnectorInterface, KVCaches
from kvkeep.layerwise import LoadStep, retrieve_layers, store_layers
from kvkeep.loading import OpenLoad, refuse_load
from kvkeep.looking_up import look_up, refuse_lookup
from kvkeep.looking_up_later import look_up_later
from kvkeep.metrics import Metrics
from kvkeep.ranks.base import OTHER_RANKS, RankGroup
from kvkeep.removing import Remover
from kvkeep.request import EngineParts, Request, merge_scope
from kvkeep.results import CheckReport, EngineHealth, FoundTokens, StoreResult, StoreStop
from kvkeep.storage.manager import StorageManager
from kvkeep.storing import OpenStore, refuse_store
from kvkeep.tokens import PLAIN, ChunkedTokenDatabase, RequestScope

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
        with OpenStore(self._parts, request) as opened:
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
        with OpenLoad(self._parts, request) as load:
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
