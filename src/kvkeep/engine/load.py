"""LoadOp: the chunks of one request from their lease to the engine's pages.

Used by one caller at a time. It claims the lease of the request's lookup and holds a reference to
every chunk it will load; closing it gives all of that back, on every path.

What a load needs of the other ranks: its name among them, and the chunks that rank 0 lends.

Pure but for the views of rank 0's memory; used by ``loading.py``.

look_up: the longest stored prefix of a prompt, and the lease on it. Callable from any thread.

look_up_later: the longest stored prefix, answered once it is in memory and held.

Callable from any thread; nothing here waits.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.engine.removal import Remover, TaggedKeys
from kvkeep.engine.request import COPY_ERRORS, ENGINE_MEMORY, EngineParts, Request
from kvkeep.engine.results import FoundTokens
from kvkeep.gpu.base import SKIP_SLOT, GPUConnectorInterface
from kvkeep.gpu.pages import slots_as_array
from kvkeep.hashing import ChunkKey
from kvkeep.memory.base import MemoryObj, References
from kvkeep.prefix import LocatedRun
from kvkeep.ranks.base import OTHER_RANKS, Round
from kvkeep.storage.prefetch import Prefetched
from kvkeep.tokens import TokenChunks

#: The tier of a chunk that a rank copied out of rank 0's memory.
FIRST_RANK = "FirstRank"


def load_tag(
    req_id: str | None, wanted: Sequence[tuple[int, int, ChunkKey]], *, has_same_keys: bool
) -> bytes:
    """32 bytes that every rank computes alike for one load.

    Args:
        req_id: the request.
        wanted: (start, end, key) of the chunks to load.
        has_same_keys: the chunks have one key on every rank, so that it can name them.
    """
    digest = hashlib.sha256(f"kvkeep load\0{req_id}\0".encode())
    for start, end, key in wanted:
        digest.update(b"%d,%d;" % (start, end))
        if has_same_keys:
            digest.update(key)
    return digest.digest()


def borrow_all(
    round_: Round | None,
    wanted: Sequence[tuple[int, int, ChunkKey]],
    connector: GPUConnectorInterface,
) -> list[MemoryObj]:
    """Views of the chunks that rank 0 offers, from the first on, until one does not fit."""
    objs: list[MemoryObj] = []
    if round_ is None:
        return objs
    for index, (start, end, _) in enumerate(wanted[: round_.num_offered]):
        obj = round_.borrow(index, *connector.chunk_shape(end - start))
        if obj is None:
            break
        objs.append(obj)
    return objs


_log = logging.getLogger(__name__)
_AGAIN = "a load failed and is tried chunk by chunk (%s): %s"


def refuse_load(parts: EngineParts, request: Request) -> torch.Tensor:
    """The mask of a load that is not done: all False. The lease of the request ends."""
    if request.req_id is not None:
        parts.storage_manager.batched_unpin(request.req_id)
    chunks = parts.token_database.process_tokens(request.tokens, request.mask, request.scope)
    if chunks.num_tokens:
        parts.metrics.load_failed(chunks.num_tokens - chunks.num_masked, "unhealthy")
    return torch.zeros(chunks.num_tokens, dtype=torch.bool)


class LoadOp:
    """A load that holds its chunks. Use it as a context manager.

    Attributes:
        keys: keys of the chunks that will be loaded.
    """

    def __init__(self, parts: EngineParts, request: Request) -> None:
        """Claim the request's lease and get the longest prefix that is stored.

        Raises:
            TokenError, MaskError: the request is malformed.
            ValueError: the slot mapping is no flat integer tensor.
        """
        self._parts = parts
        self._request = request
        self._held = References()
        self._span = parts.metrics.spans.start("load", request.req_id)
        self._tiers: list[str] = []  # where each object came from
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.keys: list[ChunkKey] = []
        self._prompt_keys: list[ChunkKey] = []
        self._round: Round | None = None
        claim = parts.storage_manager.claim_lease
        self._lease = claim(request.req_id) if request.req_id is not None else None
        try:
            chunks = parts.token_database.process_tokens(
                request.tokens, request.mask, request.scope
            )
            self._num_tokens = chunks.num_tokens
            self._prompt_keys = chunks.keys
            self._slots: npt.NDArray[np.int64] | None = None
            if request.slot_mapping is not None:
                self._slots = slots_as_array(request.slot_mapping)
            self._gather_with_ranks(self._without_skipped(list(chunks)))
        except BaseException as error:
            self._span.end(error)
            self.close()
            raise
        self._span.note({"tokens": self._num_tokens, "tokens_found": self.num_found})

    @property
    def num_found(self) -> int:
        """Tokens of the chunks that will be loaded."""
        return sum(self._ends) - sum(self._starts)

    def _without_skipped(
        self, parts: list[tuple[int, int, ChunkKey]]
    ) -> list[tuple[int, int, ChunkKey]]:
        """The chunks of which at least one token is to be written."""
        if self._slots is None or not parts:
            return parts
        skipped = self._slots == SKIP_SLOT
        if not skipped.any():
            return parts
        offset = self._request.offset
        before = np.concatenate(([0], np.cumsum(skipped)))  # skipped slots before each position
        bounds = np.array([(start, end) for start, end, _ in parts], np.int64) - offset
        inside = np.clip(bounds, 0, len(skipped))
        counts = before[inside[:, 1]] - before[inside[:, 0]]
        whole = counts == bounds[:, 1] - bounds[:, 0]
        return [part for part, is_skipped in zip(parts, whole, strict=True) if not is_skipped]

    def _gather_with_ranks(self, wanted: list[tuple[int, int, ChunkKey]]) -> None:
        """Get references to the chunks, out of rank 0's memory if this rank stores nothing."""
        ranks = self._parts.ranks
        if ranks is None or not wanted:
            self._gather(wanted)
            return
        tag = load_tag(self._request.req_id, wanted, has_same_keys=ranks.shares_kv)
        if ranks.is_passive:
            self._round = ranks.open_round(tag)
            self._held.adopt(borrow_all(self._round, wanted, self._parts.gpu_connector))
            self._tiers = [FIRST_RANK] * len(self._held.objects)
            self._drop_misfits(wanted)
            return
        self._gather(wanted)
        self._round = ranks.open_round(tag, self._held.objects)
        if self._round is None and self._held.objects:
            self._parts.metrics.load_failed(self.num_found, OTHER_RANKS)
            self._keep(0)
            self._starts, self._ends, self.keys = [], [], []

    def _gather(self, wanted: list[tuple[int, int, ChunkKey]]) -> None:
        """Get references to the chunks from the first on, until one is missing."""
        keys = [key for _, _, key in wanted]
        storage = self._parts.storage_manager
        if self._lease is not None:
            for key in keys:
                obj = self._lease.get(key)
                if obj is None:
                    break
                self._held.adopt([obj])
                self._tiers.append(storage.allocator_backend.name)
        leased = len(self._tiers)
        located = self._fetch(keys[leased:])
        lost = wanted[len(self._tiers) : leased + located]
        if lost:
            tokens = sum(end - start for start, end, _ in lost)
            self._parts.metrics.load_failed(tokens, "missing")
        self._drop_misfits(wanted)

    def _fetch(self, keys: list[ChunkKey]) -> int:
        """Get references from the tiers that have the chunks, until one is missing.

        What is in memory already is held before room is made for what is not, which would otherwise
        evict it.

        Returns:
            How many chunks the tiers said that they have.
        """
        storage = self._parts.storage_manager
        runs = storage.get_block_mapping(keys, to_load=True)
        located = runs[-1].end if runs else 0
        own = storage.allocator_backend.name
        objs: list[MemoryObj | None] = [None] * located
        tiers = [run.location for run in runs for _ in range(run.start, run.end)]
        first_gap = located
        with References() as fetched:
            for run in sorted(runs, key=lambda run: run.location != own):
                if run.start >= first_gap:
                    continue
                found = storage.batched_get(keys[run.start : run.end], run.location)
                fetched.adopt(found)
                objs[run.start : run.end] = found
                if None in found:
                    first_gap = min(first_gap, run.start + found.index(None))
            fetched.detach()
        self._held.adopt(objs[:first_gap])
        References(objs[first_gap:]).release()
        self._tiers += tiers[:first_gap]
        return located

    def _keep(self, count: int) -> None:
        """Give back all objects but the first ``count``."""
        References(self._held.objects[count:]).release()
        del self._held.objects[count:]
        del self._tiers[count:]

    def _drop_misfits(self, wanted: list[tuple[int, int, ChunkKey]]) -> None:
        """End the prefix before an object that is not as large as its chunk."""
        sizes: dict[int, int] = {}  # bytes by tokens
        for number, obj in enumerate(self._held.objects):
            start, end, _ = wanted[number]
            size = sizes.get(end - start)
            if size is None:
                shape, dtype, _ = self._parts.gpu_connector.chunk_shape(end - start)
                size = sizes[end - start] = math.prod(shape) * dtype.itemsize
            if obj.size_bytes != size:
                self._parts.metrics.failure(self._tiers[number], "get", "wrong_size")
                self._keep(number)
                break
        for start, end, key in wanted[: len(self._held.objects)]:
            self._starts.append(start)
            self._ends.append(end)
            self.keys.append(key)

    def copy(self) -> int:
        """Copy all layers into the engine; returns how many chunks are in its pages now.

        Raises:
            ValueError: the slot mapping or the caches are not what the engine's are.
        """
        if not self._held.objects:
            return self.conclude(0)
        request = self._request
        started = time.perf_counter()
        try:
            self._parts.gpu_connector.batched_to_gpu(
                self._held.objects,
                self._starts,
                self._ends,
                kvcaches=request.kvcaches,
                slot_mapping=request.slot_mapping,
                offset=request.offset,
            )
            written = len(self._held.objects)
        except COPY_ERRORS as error:
            written = self.copy_singly(error)
        seconds = time.perf_counter() - started
        written = self.conclude(written)
        self.count(written, seconds)
        return written

    def conclude(self, written: int) -> int:
        """``written`` chunks are in the engine's pages; how many of them every rank has."""
        round_, self._round = self._round, None
        agreed = round_.conclude(written) if round_ is not None else written
        if agreed < written:
            lost = sum(self._ends[agreed:written]) - sum(self._starts[agreed:written])
            self._parts.metrics.load_failed(lost, OTHER_RANKS)
        return agreed

    def copy_layers(self) -> Generator[None, None, None] | None:
        """A copier that completes one layer per ``next()``; None if nothing was found.

        Raises:
            ValueError: the slot mapping or the caches are not what the engine's are.
        """
        if not self._held.objects:
            return None
        request = self._request
        return self._parts.gpu_connector.layerwise_to_gpu(
            self._held.objects,
            self._starts,
            self._ends,
            kvcaches=request.kvcaches,
            slot_mapping=request.slot_mapping,
            offset=request.offset,
        )

    def copy_singly(self, error: BaseException) -> int:
        """Copy chunk by chunk, since a transfer of all failed somewhere.

        Returns:
            How many chunks are in the engine's pages; the next one could not be copied.
        """
        metrics = self._parts.metrics
        metrics.failure(ENGINE_MEMORY, "load", type(error).__name__)
        self._span.note({"failed": type(error).__name__})
        request = self._request
        _log.warning(_AGAIN, request.req_id, error, extra={"request": request.req_id})
        for number, obj in enumerate(self._held.objects):
            start, end = self._starts[number], self._ends[number]
            try:
                self._parts.gpu_connector.to_gpu(
                    obj,
                    start,
                    end,
                    kvcaches=request.kvcaches,
                    slot_mapping=request.slot_mapping,
                    offset=request.offset,
                )
            except COPY_ERRORS:
                lost = sum(self._ends[number:]) - sum(self._starts[number:])
                metrics.load_failed(lost, "copy")
                return number
        return len(self._held.objects)

    def count(self, num_chunks: int, seconds: float) -> None:
        """The first ``num_chunks`` chunks were loaded in ``seconds``."""
        if not num_chunks:
            return
        tokens: dict[str, int] = {}
        num_bytes = 0
        for number, obj in enumerate(self._held.objects[:num_chunks]):
            num_tokens = self._ends[number] - self._starts[number]
            tokens[self._tiers[number]] = tokens.get(self._tiers[number], 0) + num_tokens
            num_bytes += obj.size_bytes
        self._parts.metrics.loaded(tokens, num_bytes, seconds)
        self._span.note(
            {"tokens_loaded": sum(tokens.values()), "bytes": num_bytes, "tiers": list(tokens)}
        )

    def mask(self, num_chunks: int) -> torch.Tensor:
        """True exactly where the first ``num_chunks`` chunks were written: bool [tokens], CPU."""
        written = np.zeros(self._num_tokens, np.bool_)
        for start, end in zip(self._starts[:num_chunks], self._ends[:num_chunks], strict=True):
            written[start:end] = True
        if self._slots is not None:
            offset = self._request.offset
            part = written[offset : offset + len(self._slots)]
            part &= self._slots[: len(part)] != SKIP_SLOT
        return torch.from_numpy(written)

    def settle(self, written: int, tagged: TaggedKeys, remover: Remover | None) -> None:
        """Note what was loaded: its tags, and its order, or remove it where that is wanted.

        The prompt is to be evicted from its end on, whatever tiers it came from. Call it after
        :meth:`close`, which notes the use of what was pinned, and not from a finalizer: it waits
        for the locks of the tiers.

        Args:
            written: chunks that are in the engine's pages.
            tagged: where tags are noted.
            remover: removes chunks that were loaded; None keeps them.
        """
        if remover is None:
            tagged.note(self._request.scope.tags, self.keys[:written])
        elif written:
            remover.remove(self.keys[:written])
        if self.keys:
            self._parts.storage_manager.note_order(self._prompt_keys)

    def close(self) -> None:
        """Give all references and the lease back; a second call does nothing."""
        round_, self._round = self._round, None
        if round_ is not None:
            round_.abort()
        self._held.release()
        if self._lease is not None:
            self._lease.release()
        self._span.end()

    def __enter__(self) -> LoadOp:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._span.end(error)
        self.close()


def look_up(
    parts: EngineParts,
    chunks: TokenChunks,
    *,
    lease_id: str | None,
    search_range: Collection[str] | None,
    counted: bool = True,
) -> FoundTokens:
    """Number of tokens found, and in which tiers.

    Args:
        parts: of the engine.
        chunks: the prompt.
        lease_id: pin what is found and register the lease under this id, in place of the one that
            it had; None pins nothing.
        search_range: names of the tiers to ask; all if None.
        counted: the lookup is part of the hit rate.

    Raises:
        ValueError: no tier is called so.
    """
    started = time.perf_counter()
    with parts.metrics.spans.start("lookup", lease_id) as span:
        runs = _locate(parts, chunks, lease_id, search_range)
        found = FoundTokens(
            [(run.location, chunks.end_of(run.end) - chunks.end_of(run.start)) for run in runs]
        )
        by_tier = found.sums()
        span.note({"tokens": chunks.num_tokens, "tokens_found": found, "tiers": list(by_tier)})
    parts.metrics.lookup_took(time.perf_counter() - started)
    if counted:
        parts.metrics.lookup(asked=chunks.num_tokens, found=by_tier)
    return found


def _locate(
    parts: EngineParts,
    chunks: TokenChunks,
    lease_id: str | None,
    search_range: Collection[str] | None,
) -> list[LocatedRun]:
    """Where the chunks are; the lease, if there is to be one, is registered."""
    storage = parts.storage_manager
    lease = storage.leases.open(lease_id) if lease_id is not None else None
    try:
        runs = storage.get_block_mapping(chunks.keys, search_range, pin=lease)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    if lease is not None and lease_id is not None:
        if runs:
            storage.leases.keep(lease_id, lease)
        else:
            lease.release()  # a tier may have pinned something and failed then
            storage.leases.release(lease_id)
    return runs


def refuse_lookup(
    parts: EngineParts, chunks: TokenChunks, cause: str, *, counted: bool
) -> FoundTokens:
    """The answer of an engine that cannot load: nothing is found, a miss in the hit rate too."""
    parts.metrics.failure(ENGINE_MEMORY, "lookup", cause)
    if counted:
        parts.metrics.lookup(asked=chunks.num_tokens, found={})
    return FoundTokens()


def look_up_later(
    parts: EngineParts,
    chunks: TokenChunks,
    lookup_id: str,
    *,
    search_range: Collection[str] | None,
    counted: bool,
) -> Future[FoundTokens]:
    """Number of tokens found and in which tiers they were, as a future that cannot be cancelled.

    It is done already where everything is in memory.

    Args:
        parts: of the engine.
        chunks: the prompt.
        lookup_id: names the lookup and its lease.
        search_range: names of the tiers to ask; all if None.
        counted: the lookup is part of the hit rate.

    Raises:
        ValueError: no tier is called so.
    """
    started = time.perf_counter()
    span = parts.metrics.spans.start("lookup", lookup_id)
    try:
        prefetching = parts.storage_manager.async_lookup_and_prefetch(
            lookup_id, chunks.keys, (0, *chunks.ends), search_range
        )
    except ValueError as error:
        span.end(error)
        raise
    answer: Future[FoundTokens] = Future()
    answer.set_running_or_notify_cancel()

    def arrived(future: Future[Prefetched]) -> None:
        runs = future.result().runs
        found = FoundTokens(
            [(run.location, chunks.end_of(run.end) - chunks.end_of(run.start)) for run in runs]
        )
        span.note({"tokens": chunks.num_tokens, "tokens_found": found, "tiers": list(found.sums())})
        span.end()
        parts.metrics.lookup_took(time.perf_counter() - started)
        if counted:
            parts.metrics.lookup(asked=chunks.num_tokens, found=found.sums())
        answer.set_result(found)

    prefetching.add_done_callback(arrived)
    return answer
