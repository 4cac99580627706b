"""The scheduler side: what to ask, what to load, what to store, and when a lease is over.

Scheduler process only, from the scheduler's thread. It holds no KV: it asks the workers' lookup
servers.

``match`` asks for each waiting request, ``allocated`` turns what was found into a load, and
``plan_saves`` lets go of what was found and then not used (``lookup_tracker.py`` has
the details). Once a load was planned, its lease belongs to the worker, which claims it when it
carries the load out.

On the tokens of a request whose chunks 0 and 1 are stored::

    chunk    |   0    |   1    |   2    | 3..
    engine   | local  |        |        |        num_computed: the engine's own prefix cache
    found    |-----------------|
    load              |--------|                 at most to the last token but one
    save                       |--------|        once the step has computed it

hit_sources: where found tokens were, in the words of vLLM's metrics. A pure function.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvkeep.connectors.vllm.lookup_tracker import LookupTracker
from kvkeep.connectors.vllm.messages import LoadSpec, SaveSpec, StepMeta, WorkerMeta
from kvkeep.connectors.vllm.request import LoraNames, TrackedRequest, scope_of
from kvkeep.engine.results import FoundTokens
from kvkeep.errors import LookupServiceError
from kvkeep.lookup.client import LookupClient
from kvkeep.tokens import PLAIN, RequestScope

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_SOURCES = {"LocalCPUBackend": CacheHitSource.HOST, "LocalDiskBackend": CacheHitSource.DISK}


def hit_sources(found: FoundTokens, start: int, num_tokens: int) -> dict[CacheHitSource, int]:
    """Tokens [start, start + num_tokens) of what a lookup found, by vLLM's sources.

    A tier that vLLM has no word for (a remote store, a plugin) is EXTERNAL_UNSPECIFIED, and so is
    what was not found at all.
    """
    sources: dict[CacheHitSource, int] = {}
    left = num_tokens
    for sign, tiers in ((1, found.first(start + num_tokens).tiers), (-1, found.first(start).tiers)):
        for tier, count in tiers:
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + sign * count
            left -= sign * count
    if left > 0:
        unknown = CacheHitSource.EXTERNAL_UNSPECIFIED
        sources[unknown] = sources.get(unknown, 0) + left
    return {source: count for source, count in sources.items() if count}


logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that it is shown


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What the scheduler side has to know.

    Attributes:
        chunk_size: tokens in a chunk, a multiple of ``block_size``.
        block_size: tokens in a block (page) of the engine.
        store_decode: store generated tokens, too.
        save_unfull_chunk: store the prompt's tail that fills no chunk, too.
        may_load: this engine reads the cache.
        may_store: this engine writes it.
        prefetches: requests wait in the queue while their chunks come from slow tiers.
        hold_s: how long after an answer the workers are sure to hold what they found.
        loads_between_steps: requests wait for their load, and no step does.
        adapter_settings: how the engine applies LoRA adapters.
        inputs_are_hashed: the engine names images by their content.
    """

    chunk_size: int
    block_size: int
    store_decode: bool = False
    save_unfull_chunk: bool = False
    may_load: bool = True
    may_store: bool = True
    prefetches: bool = False
    hold_s: float = 60.0
    loads_between_steps: bool = False
    adapter_settings: str = ""
    inputs_are_hashed: bool = True


class SchedulerSide:
    """Plans loads and saves, step by step."""

    def __init__(self, client: LookupClient, options: SchedulerOptions) -> None:
        """Start without requests.

        Args:
            client: asks the workers; belongs to this object from now on.
            options: sizes and roles.
        """
        self._client = client
        self._options = options
        self._loras = LoraNames(options.adapter_settings)
        self._asking = LookupTracker(client, prefetches=options.prefetches, hold_s=options.hold_s)
        self._tracked: dict[str, TrackedRequest] = {}
        self._loads: list[LoadSpec] = []
        self._known_failures: dict[int, int] = {}
        self._suspects: set[str] = set()  # requests that lived when a load failed
        self._num_resets = 0
        self._reset_tag = ""  # names what is computed since the last reset

    @property
    def loads_between_steps(self) -> bool:
        """Requests wait for their load, and no step does."""
        return self._options.loads_between_steps

    def use_prefix_cache(self, own_tokens: Callable[[Request], int]) -> None:
        """Bring nothing ahead of a request's turn that the engine's own cache has.

        Args:
            own_tokens: leading tokens of a request in that cache.
        """
        self._asking.own_tokens = own_tokens

    def arrived(self, request: Request) -> None:
        """A request was queued; its chunks may begin to travel before its turn comes."""
        if not self._options.prefetches:
            return
        tracked = self._track(request)
        num_asked = self._num_to_ask(request, tracked)
        if num_asked:
            self._asking.queue(request.request_id, tracked, num_asked)

    def match(self, request: Request, num_computed: int) -> int | None:
        """How many tokens beyond ``num_computed`` can be loaded for a waiting request.

        Args:
            request: asked about by the scheduler, perhaps once per step for as long as it waits.
            num_computed: tokens that the engine has itself, a multiple of the block size.

        Returns:
            Tokens to load, whose chunks are leased. At most all but the last token, which the
            engine must compute. None: not yet, chunks are on their way into memory.
        """
        tracked = self._track(request)
        num_asked = self._num_to_ask(request, tracked)
        limit = request.num_tokens - 1
        if min(num_asked, limit) <= num_computed:
            self._asking.drop(request.request_id)
            return 0
        is_alone = len(self._tracked) == 1
        found = self._asking.ask(request.request_id, tracked, num_asked, is_alone=is_alone)
        if found is None:
            return None
        tracked.saved = found
        tracked.found, tracked.found_after = found, num_computed
        num_external: int = min(found, limit) - num_computed
        if num_external <= 0:
            self._asking.drop(request.request_id)
            return 0
        return num_external

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """The scheduler gave the request its blocks and will count on ``num_external`` tokens.

        Raises:
            LookupServiceError: that many were never promised.
        """
        if num_external <= 0:
            return  # plan_saves() ends the lease, if there is one
        tracked = self._tracked.get(request.request_id)
        lookup_id = self._asking.take(request.request_id)
        if lookup_id is None or tracked is None or tracked.scope is None:
            raise LookupServiceError(f"nothing was found for {request.request_id}")
        end = tracked.found_after + num_external
        size = self._options.chunk_size
        num_tokens = min(-(-end // size) * size, int(tracked.found))
        load = LoadSpec(
            lookup_id=lookup_id,
            tokens=tracked.token_bytes(num_tokens),
            scope=tracked.scope,
            start=tracked.found_after,
            end=end,
            block_ids=tuple(blocks.get_block_ids()[0]),
            req_id=request.request_id,
            is_waited_for=self._options.loads_between_steps,
        )
        self._loads.append(load)

    def sources(self, request: Request, num_external: int) -> dict[CacheHitSource, int]:
        """In which tiers the tokens are that were promised for a request."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return {}
        return hit_sources(tracked.found, tracked.found_after, num_external)

    def break_promise(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Plan a load that fails, so that the engine hears that it cannot count on these blocks."""
        block_ids = tuple(blocks.get_block_ids()[0])
        end = len(block_ids) * self._options.block_size
        self._asking.drop(request.request_id)
        is_waited_for = self._options.loads_between_steps
        spec = LoadSpec("", b"", PLAIN, 0, end, block_ids, request.request_id, is_waited_for)
        self._loads.append(spec)

    def take_loads(self) -> StepMeta:
        """The loads of the step that was just scheduled."""
        loads, self._loads = self._loads, []
        return StepMeta(loads, [], dict(self._known_failures), self._num_resets)

    def plan_saves(self, output: SchedulerOutput) -> list[SaveSpec]:
        """The saves of the step that was just scheduled; ends what was found in vain."""
        self._asking.end_step(is_idle=not output.total_num_scheduled_tokens)
        blocks = output.kv_connector_block_state
        if blocks is None or not self._options.may_store:
            return []
        saves: list[SaveSpec] = []
        for req_id, num_before in _computed_before(output):
            tracked = self._tracked.get(req_id)
            if tracked is None or not tracked.may_store:
                continue
            num_after = num_before + output.num_scheduled_tokens.get(req_id, 0)
            end = self._end_of_save(tracked.request, num_after)
            if end <= tracked.saved:
                continue
            self._look_again(tracked)
            if tracked.scope is None:
                continue
            table = blocks.resolve_block_ids(req_id)[0]
            start = tracked.saved - tracked.saved % self._options.chunk_size
            first, last = start // self._options.block_size, -(-end // self._options.block_size)
            if len(table) < last:
                continue
            spec = SaveSpec(
                req_id=req_id,
                tokens=tracked.token_bytes(end),
                scope=tracked.scope,
                start=start,
                block_ids=tuple(table[first:last]),
            )
            saves.append(spec)
            tracked.saved = end
        return saves

    def heard(self, meta: WorkerMeta) -> None:
        """The workers' report on a step.

        After a failed load nothing is stored of any request that lived then, nor of one that came
        while such a request still lives and whose prefix may be shared with it. A load for which
        its request waited spoils nothing; it is not tried again, or it might fail for ever.
        """
        for req_id in meta.failed_requests & self._tracked.keys():
            self._tracked[req_id].may_load = False
        news = {
            rank: count
            for rank, count in meta.failures.items()
            if count > self._known_failures.get(rank, 0)
        }
        if not news:
            return
        self._known_failures.update(news)
        self._suspects |= self._tracked.keys()
        for tracked in self._tracked.values():
            tracked.may_store = False
        logger.warning(
            "a load failed; nothing is stored of the %d requests alive", len(self._tracked)
        )

    def finished(self, request: Request) -> None:
        """The request is over, however it ended. A planned load's lease is the worker's."""
        self._asking.drop(request.request_id)
        self._tracked.pop(request.request_id, None)
        self._suspects.discard(request.request_id)

    def reset(self) -> None:
        """Forget all chunks, because the weights changed, say.

        Nothing is stored any more of what was computed before, the step in flight included. What is
        computed from now on gets other keys, since the identity does not know of the change: other
        processes on the same disk may go on writing, and a restart may bring the old weights back.
        So it is done on return, also where a worker is not through with removing them.
        """
        self._asking.drop_all()
        self._reset_tag = f"reset {uuid.uuid4()}"
        for tracked in self._tracked.values():
            tracked.may_store = False
            tracked.scope = self._scope_of(tracked.request)
        self._num_resets += 1
        try:
            self._client.clear()
        except LookupServiceError as error:
            logger.warning("chunks that no request finds any more are not removed yet: %s", error)

    def close(self) -> None:
        """End what was found and let go of the workers."""
        self._asking.drop_all()
        self._client.close()

    def _track(self, request: Request) -> TrackedRequest:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            tracked = TrackedRequest(request, self._scope_of(request))
            tracked.may_store = not self._suspects
            self._tracked[request.request_id] = tracked
        else:
            self._look_again(tracked)
        return tracked

    def _look_again(self, tracked: TrackedRequest) -> None:
        """What a request adds to the identity, where that may have changed since it came.

        A turn of a session may bring an image, and the files of an adapter may be replaced.
        """
        if tracked.request.resumable or tracked.request.lora_request is not None:
            tracked.scope = self._scope_of(tracked.request)

    def _num_to_ask(self, request: Request, tracked: TrackedRequest) -> int:
        """Leading tokens that may be found and loaded."""
        if (
            tracked.scope is None
            or not tracked.may_load
            or not self._options.may_load
            or request.skip_reading_prefix_cache
        ):
            return 0
        rest = 0 if self._options.save_unfull_chunk else request.num_tokens
        num_tokens: int = request.num_tokens - rest % self._options.chunk_size
        return num_tokens

    def _scope_of(self, request: Request) -> RequestScope | None:
        """What a request adds to the identity, the last reset included."""
        is_hashed = self._options.inputs_are_hashed
        scope = scope_of(request, self._loras, inputs_are_hashed=is_hashed)
        if scope is None or not self._reset_tag:
            return scope
        return replace(scope, tags=tuple(sorted((*scope.tags, (self._reset_tag, "")))))

    def _end_of_save(self, request: Request, num_after: int) -> int:
        """Token after the last one to store when ``num_after`` tokens are computed.

        A token that the engine is still sampling is not known here, and so not stored yet.
        """
        prompt: int = min(request.num_prompt_tokens, request.num_tokens)
        known = request.num_tokens if self._options.store_decode else prompt
        num_after = min(num_after, known)
        end: int = num_after - num_after % self._options.chunk_size
        if self._options.save_unfull_chunk and end < prompt <= num_after:
            return prompt
        return end


def _computed_before(output: SchedulerOutput) -> list[tuple[str, int]]:
    """(request id, tokens computed before the step) of every request in the step."""
    new = [(data.req_id, data.num_computed_tokens) for data in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    return new + list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
