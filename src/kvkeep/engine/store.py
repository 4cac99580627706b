"""StoreOp: the chunks of one request from the reservation of their memory to their commit.

Used by one caller at a time. Nothing of it is visible before :meth:`StoreOp.commit`; closing it
without that gives all memory back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from itertools import groupby
from types import TracebackType

from kvkeep.backends.base import PutOutcome
from kvkeep.engine.request import COPY_ERRORS, ENGINE_MEMORY, EngineParts, Request
from kvkeep.engine.results import StoreResult, StoreStop
from kvkeep.hashing import ChunkKey
from kvkeep.memory.base import References

#: What a tier that did not take a chunk means for the store, the most telling first.
_LOSSES = ((PutOutcome.NO_ROOM, StoreStop.NO_ROOM), (PutOutcome.DROPPED, StoreStop.DROPPED))
_KEPT = frozenset({PutOutcome.STORED, PutOutcome.PRESENT})

_log = logging.getLogger(__name__)


def _given_way(
    copier: Generator[None, None, None], make_way: Callable[[], AbstractContextManager[object]]
) -> Generator[None, None, None]:
    """The same layers; others give way while one is copied, in whichever thread that is."""
    with closing(copier):
        while True:
            with make_way():
                try:
                    next(copier)
                except StopIteration:
                    return
            yield


def refuse_store(parts: EngineParts, request: Request, stop: StoreStop) -> StoreResult:
    """The result of a store that is not done; raises what a store would for wrong arguments."""
    chunks = parts.token_database.process_tokens(request.tokens, request.mask, request.scope)
    refused = chunks.num_tokens - chunks.num_masked
    if refused:
        parts.metrics.store_skipped(refused, stop.value)
    return StoreResult(chunks.end_of(chunks.first), 0, stop)


class StoreOp:
    """A store that has its memory and is not committed. Use it as a context manager.

    Attributes:
        copied_keys: keys of the chunks that were committed.
    """

    def __init__(self, parts: EngineParts, request: Request) -> None:
        """Cut the prompt, drop the chunks that are stored and reserve memory for the others.

        Raises:
            TokenError, MaskError: the request is malformed.
        """
        self._parts = parts
        self._request = request
        self._chunks = parts.token_database.process_tokens(
            request.tokens, request.mask, request.scope
        )
        self._span = parts.metrics.spans.start("store", request.req_id)
        self._stops: dict[int, StoreStop] = {}  # by index of the chunk; the others are stored
        self._taken: list[tuple[int, int, int]] = []  # (index, start, end) of those with memory
        self._held = References()
        self._seconds = 0.0
        self.copied_keys: list[ChunkKey] = []
        # While it is open, tiers hold their background work back.
        self._way = parts.storage_manager.make_way()
        try:
            self._reserve()
        except BaseException as error:
            self._span.end(error)
            self.close()
            raise

    def _reserve(self) -> None:
        """Memory for the missing chunks from the first on, as far as there is room."""
        storage = self._parts.storage_manager
        missing = self._missing()
        protect = frozenset(self._chunks.keys)
        for num_tokens, group in groupby(missing, lambda part: part[2] - part[1]):
            wanted = list(group)
            shape, dtype, fmt = self._parts.gpu_connector.chunk_shape(num_tokens)
            objs = storage.allocate_prefix(shape, dtype, len(wanted), fmt, protect=protect)
            self._held.adopt(objs)
            self._taken += wanted[: len(objs)]
            if len(objs) < len(wanted):
                break
        for index, _, _ in missing[len(self._taken) :]:
            self._stops[index] = StoreStop.NO_ROOM

    def _missing(self) -> list[tuple[int, int, int]]:
        """(index, start, end) of the chunks that are not masked and not stored.

        All tiers are asked once, for the run of chunks that they know to be stored: this is the
        engine's thread, which waits for no disk and no server. After its end only the memory is
        asked. What a lower tier has there is copied out of the engine again, and put into those
        that lack it.
        """
        chunks = self._chunks
        storage = self._parts.storage_manager
        parts = [
            (chunks.first + number, start, end) for number, (start, end, _) in enumerate(chunks)
        ]
        present = storage.known_run(chunks.keys[chunks.first :])
        first, rest = parts[present : present + 1], parts[present + 1 :]
        own = storage.storage_backends.keys() & {storage.allocator_backend.name}
        return first + [part for part in rest if not storage.contains(chunks.keys[part[0]], own)]

    def copy(self) -> None:
        """Copy all layers out of the engine. A failure leaves nothing to commit.

        Raises:
            ValueError: the slot mapping or the caches are not what the engine's are.
        """
        if not self._taken:
            return
        request = self._request
        started = time.perf_counter()
        try:
            self._parts.gpu_connector.batched_from_gpu(
                self._held.objects,
                [start for _, start, _ in self._taken],
                [end for _, _, end in self._taken],
                kvcaches=request.kvcaches,
                slot_mapping=request.slot_mapping,
                offset=request.offset,
            )
        except COPY_ERRORS as error:
            self.fail(error)
        self._seconds += time.perf_counter() - started

    def copy_layers(self) -> Generator[None, None, None] | None:
        """A copier that completes one layer per ``next()``; None if there is nothing to copy.

        It may take as long as a forward pass, so tiers hold back what they store in the background
        while a layer is copied, and not in between.

        Raises:
            ValueError: the slot mapping or the caches are not what the engine's are.
        """
        self._way.close()
        if not self._taken:
            return None
        request = self._request
        try:
            copier = self._parts.gpu_connector.layerwise_from_gpu(
                self._held.objects,
                [start for _, start, _ in self._taken],
                [end for _, _, end in self._taken],
                kvcaches=request.kvcaches,
                slot_mapping=request.slot_mapping,
                offset=request.offset,
            )
        except COPY_ERRORS as error:
            self.fail(error)
            return None
        return _given_way(copier, self._parts.storage_manager.make_way)

    def spent(self, seconds: float) -> None:
        """Copying took ``seconds`` more."""
        self._seconds += seconds

    def fail(self, error: BaseException) -> None:
        """The copy failed: count it and give the memory back."""
        self._parts.metrics.failure(ENGINE_MEMORY, "store", type(error).__name__)
        self._span.note({"failed": type(error).__name__})
        fields = {"request": self._request.req_id}
        _log.warning("a store failed (%s): %s", self._request.req_id, error, extra=fields)
        self._stops.update((index, StoreStop.FAILED) for index, _, _ in self._taken)
        self._taken = []
        self._held.release()

    def commit(self) -> StoreResult:
        """Make what was copied visible, all layers of a chunk at once."""
        copied_tokens, copied_bytes = self._put()
        metrics = self._parts.metrics
        if copied_tokens:
            metrics.stored(copied_tokens, copied_bytes, self._seconds)
        chunks = self._chunks
        skipped: dict[StoreStop, int] = {}
        for index, stop in self._stops.items():
            num_tokens = chunks.end_of(index + 1) - chunks.end_of(index)
            skipped[stop] = skipped.get(stop, 0) + num_tokens
        for stop, num_tokens in skipped.items():
            metrics.store_skipped(num_tokens, stop.value)
        self._span.note(
            {"tokens": chunks.num_tokens, "tokens_stored": copied_tokens, "bytes": copied_bytes}
        )
        return self._result(copied_tokens)

    def _put(self) -> tuple[int, int]:
        """Put the copied chunks; (tokens, bytes) of those that some tier has kept."""
        objs = self._held.detach()
        sizes = [obj.size_bytes for obj in objs]
        keys = [self._chunks.keys[index] for index, _, _ in self._taken]
        results = self._parts.storage_manager.batched_put(keys, objs)
        num_tokens = num_bytes = 0
        for number, (index, start, end) in enumerate(self._taken):
            outcomes = {outcomes[number] for outcomes in results.values()}
            if outcomes & _KEPT:
                num_tokens += end - start
                num_bytes += sizes[number]
                self.copied_keys.append(keys[number])
            else:
                stops = [stop for loss, stop in _LOSSES if loss in outcomes]
                self._stops[index] = stops[0] if stops else StoreStop.FAILED
        if self.copied_keys:  # the chunks before these, from earlier stores, must outlive them
            self._parts.storage_manager.note_order(self._chunks.keys)
        return num_tokens, num_bytes

    def _result(self, copied_tokens: int) -> StoreResult:
        chunks = self._chunks
        first_stop = min(self._stops, default=len(chunks.keys))
        num_tokens = chunks.end_of(first_stop)
        stop = self._stops.get(first_stop)
        if chunks.num_tokens == 0:
            stop = StoreStop.EMPTY
        elif stop is None and num_tokens < chunks.num_tokens:
            stop = StoreStop.TAIL
        return StoreResult(num_tokens, copied_tokens, stop)

    def close(self) -> None:
        """Give back what was not committed; a second call does nothing."""
        self._held.release()
        self._way.close()
        self._span.end()

    def __enter__(self) -> StoreOp:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._span.end(error)
        self.close()
