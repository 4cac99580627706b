"""What the scheduler side tells the worker side about one engine step, and what comes back.

Plain data. vLLM carries it between its own processes by its own means; kvkeep sends none of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvkeep.tokens import RequestScope


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Load KV before this step's forward pass, or between steps while its request waits.

    On tokens: ``| engine has it | load | computed by the engine |``, bordered by ``start`` and
    ``end``; ``len(tokens)`` is ``end`` rounded up to a chunk.

    Attributes:
        lookup_id: names the lease that holds what was found.
        tokens: ids from the prompt's start to the end of the last chunk to load, uint32.
        scope: what the request adds to the identity.
        start: first token to load, on a block border.
        end: token after the last one that the engine was promised.
        block_ids: the engine's blocks of the prompt, from its start to ``end`` at least.
        req_id: the request.
        is_waited_for: the request waits until the worker reports that this load has ended.
    """

    lookup_id: str
    tokens: bytes
    scope: RequestScope
    start: int
    end: int
    block_ids: tuple[int, ...]
    req_id: str = ""
    is_waited_for: bool = False


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """Store KV after this step's forward pass, which completes it.

    Attributes:
        req_id: the request.
        tokens: ids from the prompt's start to the last full chunk's end, uint32.
        scope: what the request adds to the identity.
        start: tokens that were offered before, a multiple of the chunk size.
        block_ids: the engine's blocks of the tokens from ``start`` on.
    """

    req_id: str
    tokens: bytes
    scope: RequestScope
    start: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class StepMeta(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """One step.

    Attributes:
        loads: in the order in which the requests were scheduled.
        saves: likewise.
        known_failures: failed loads per rank that the scheduler had heard of when it planned this
            step. A worker that has failed since then must not store: the step may build on KV that
            was never loaded.
        num_resets: resets of the cache so far when this step was planned; a worker that has seen
            more must not store what was computed before.
        prefill_tokens: tokens of prompts that this step computes, over all requests.
    """

    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)
    known_failures: dict[int, int] = field(default_factory=dict)
    num_resets: int = 0
    prefill_tokens: int = 0


@dataclass(slots=True)
class WorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]  # likewise
    """What the workers report after a step.

    Attributes:
        failures: failed loads before a step so far, per rank.
        failed_requests: requests whose load between steps has failed on this rank since the last
            report.
    """

    failures: dict[int, int]
    failed_requests: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMeta:
        """The reports of both."""
        if not isinstance(other, WorkerMeta):
            return self
        merged = dict(self.failures)
        for rank, count in other.failures.items():
            merged[rank] = max(count, merged.get(rank, 0))
        return WorkerMeta(merged, self.failed_requests | other.failed_requests)
