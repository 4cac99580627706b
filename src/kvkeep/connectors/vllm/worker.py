"""The worker side: carries out loads before a forward pass and saves after it.

Worker process only. ``load`` and ``save`` are called from the engine's thread; lookups arrive on
the lookup server's own thread meanwhile. Nothing here raises for what the cache cannot do: a load
that fails is reported block by block, a save that fails is counted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.connectors.vllm.background import BackgroundLoads
from kvkeep.connectors.vllm.cores import Cores
from kvkeep.connectors.vllm.counted_resets import CountedResets
from kvkeep.connectors.vllm.metadata import LoadSpec, SaveSpec, StepMeta, WorkerMeta
from kvkeep.connectors.vllm.stats import KVKeepStats, StepStats
from kvkeep.connectors.vllm.step_clock import StepClock
from kvkeep.errors import KVKeepError
from kvkeep.gpu.base import SKIP_SLOT
from kvkeep.identity import CacheIdentity
from kvkeep.keys import TOKEN_BYTES
from kvkeep.lookup.server import LookupServer
from kvkeep.manager import CacheManager

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that it is shown


class WorkerSide:
    """Loads and saves of one worker. Owns its CacheManager and its LookupServer."""

    def __init__(
        self,
        manager: CacheManager,
        *,
        identity: CacheIdentity,
        rank: int,
        socket: Path,
        block_size: int,
        runs_ahead: bool = False,
        cores: Cores | None = None,
    ) -> None:
        """Start answering lookups.

        Args:
            manager: the worker's cache, with the engine's caches registered; closed with this
                object.
            identity: the worker's identity.
            rank: the worker's rank, also where the KV is the same on every rank.
            socket: Unix socket of the lookup server.
            block_size: tokens in a block (page) of the engine.
            runs_ahead: the engine's device computes behind its thread.
            cores: that loads and saves may use; None for those that the engine's thread has.

        Raises:
            LookupServiceError: the socket cannot be bound.
        """
        self._manager = manager
        self._engine = manager.engine
        self._cores = cores or Cores()
        self._rank = rank
        self._block_size = block_size
        self._resets = CountedResets(manager.engine)
        self._failures = 0
        self._invalid_blocks: set[int] = set()
        self._background = BackgroundLoads(self._load_one)
        self._failed_requests: set[str] = set()  # whose load between steps failed, not yet reported
        self._gaps: dict[str, int] = {}  # request -> tokens stored of it before a save fell short
        self._stats = StepStats()
        self._clock = StepClock(manager.storage.cost.note_prefill, runs_ahead=runs_ahead)
        manager.metrics.follow()
        self._server = LookupServer(
            self._resets, socket, identity=identity, metrics=manager.metrics
        )

    def load(self, meta: StepMeta) -> None:
        """Load what the scheduler promised this step; complete on return.

        A load for which the request waits is only begun, see :meth:`take_finished_loads`.
        """
        if meta.loads:
            with self._cores.all_of_them():
                self._load_all(meta.loads)
        self._clock.loads_ended()

    def save(self, meta: StepMeta) -> None:
        """Store what this step has completed; complete on return.

        Nothing is stored if the step was planned before the scheduler knew of all failed loads: it
        may have computed on KV that is not there. Likewise if the cache was reset since.
        """
        self._clock.pass_ended(meta)
        if not meta.saves or self._engine.is_passive:
            return
        num_resets = self._resets.num_resets
        if (
            meta.known_failures.get(self._rank, 0) != self._failures
            or meta.num_resets != num_resets
        ):
            for spec in meta.saves:
                num_tokens = len(spec.tokens) // TOKEN_BYTES - spec.start
                self._manager.metrics.store_skipped(num_tokens, "stale step")
            return
        with self._cores.all_of_them():
            for spec in meta.saves:
                try:
                    self._save_one(spec)
                except Exception as error:  # noqa: BLE001  the top of this task
                    self.count_failure("store", error)
        self._clock.saves_ended(meta)
        if self._resets.num_resets != num_resets:
            self._engine.clear()  # the reset came while something older was on its way in

    def take_finished_loads(self) -> set[str]:
        """Requests whose load between steps has ended since the last call, however it ended.

        The blocks that lack what was promised are among the invalid ones from now on. Nothing was
        computed on them, since the request waited.
        """
        finished: set[str] = set()
        for spec, loaded_to in self._background.take_done():
            finished.add(spec.req_id)
            self._stats.loaded_tokens += loaded_to - spec.start
            if loaded_to < spec.end:
                self._report_failure(spec, loaded_to)
                self._failed_requests.add(spec.req_id)
        return finished

    def take_invalid_blocks(self) -> set[int]:
        """Blocks that this step should have loaded and did not."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def take_stats(self) -> KVKeepStats:
        """What happened since the last call."""
        stats, self._stats = self._stats, StepStats()
        return KVKeepStats.of(stats, rank=self._rank, metrics=self._manager.metrics)

    def report(self) -> WorkerMeta:
        """What the scheduler has to know after each step."""
        failed, self._failed_requests = self._failed_requests, set()
        return WorkerMeta({self._rank: self._failures}, failed)

    def forget(self, req_ids: set[str]) -> None:
        """These requests are over."""
        for req_id in req_ids:
            self._gaps.pop(req_id, None)

    def count_failure(self, operation: str, error: Exception) -> None:
        """Count and log what went wrong; called at the top of a task."""
        self._stats.failures += 1
        self._manager.metrics.failure("vllm", operation, type(error).__name__)
        logger.warning(
            "%s failed: %s", operation, error, exc_info=not isinstance(error, KVKeepError)
        )

    def close(self) -> None:
        """Stop answering and loading, and give all memory back."""
        self._server.close()
        self._background.close()
        self._manager.close()

    def _load_all(self, loads: Sequence[LoadSpec]) -> None:
        """Begin the loads that requests wait for, and carry out the others."""
        for spec in loads:
            if spec.is_waited_for:
                if not self._background.submit(spec):
                    self._unpin(spec)
                continue
            loaded_to = self._load_one(spec)
            self._stats.loaded_tokens += loaded_to - spec.start
            if loaded_to < spec.end:
                self._report_failure(spec, loaded_to)
                self._failures += 1

    def _load_one(self, spec: LoadSpec) -> int:
        """Load one request; returns the token up to which everything promised is there."""
        try:
            slots = load_slots(spec, self._block_size)
            mask = self._engine.retrieve(
                np.frombuffer(spec.tokens, "<u4"),
                kvcaches=None,
                slot_mapping=torch.from_numpy(slots),
                req_id=spec.lookup_id,
                scope=spec.scope,
            )
            written = mask.numpy()[spec.start : spec.end]
            return spec.end if written.all() else spec.start + int(written.argmin())
        except Exception as error:  # noqa: BLE001  the top of this task
            self.count_failure("retrieve", error)
            self._unpin(spec)
            return spec.start

    def _unpin(self, spec: LoadSpec) -> None:
        """The load is over: its lease ends, if it has one."""
        with contextlib.suppress(KVKeepError):
            self._engine.lookup_unpin(spec.lookup_id)

    def _report_failure(self, spec: LoadSpec, loaded_to: int) -> None:
        """Tell the engine which blocks lack what it was promised."""
        first = loaded_to // self._block_size
        last = -(-spec.end // self._block_size)
        self._invalid_blocks.update(spec.block_ids[first:last])
        self._stats.failed_tokens += spec.end - loaded_to
        logger.warning(
            "%d of %d promised tokens were not loaded", spec.end - loaded_to, spec.end - spec.start
        )

    def _save_one(self, spec: SaveSpec) -> None:
        num_tokens = len(spec.tokens) // TOKEN_BYTES
        gap = self._gaps.pop(spec.req_id, None)
        if gap is not None and gap < spec.start:
            self._gaps[spec.req_id] = gap
            self._manager.metrics.store_skipped(num_tokens - spec.start, "prefix not stored")
            return
        mask = np.ones(num_tokens, np.bool_)
        mask[: spec.start] = False
        result = self._engine.store(
            np.frombuffer(spec.tokens, "<u4"),
            mask,
            kvcaches=None,
            slot_mapping=torch.from_numpy(
                block_slots(spec.block_ids, self._block_size)[: num_tokens - spec.start]
            ),
            offset=spec.start,
            req_id=spec.req_id,
            scope=spec.scope,
        )
        self._stats.stored_tokens += result.num_copied_tokens
        if result.num_tokens < num_tokens:
            self._gaps[spec.req_id] = result.num_tokens


def block_slots(block_ids: Sequence[int], block_size: int) -> npt.NDArray[np.int64]:
    """The slots of blocks, one per token: int64 [blocks * block_size]."""
    firsts = np.asarray(block_ids, np.int64) * block_size
    return (firsts[:, None] + np.arange(block_size)).reshape(-1)


def load_slots(spec: LoadSpec, block_size: int) -> npt.NDArray[np.int64]:
    """Slot of each of the load's tokens; SKIP_SLOT where the engine has the KV or wants none.

    A block is written whole, so the last one is, even where the engine computes its last token.

    Raises:
        ValueError: the engine gave fewer blocks than it counts on.
    """
    num_tokens = len(spec.tokens) // TOKEN_BYTES
    last = -(-spec.end // block_size)
    if len(spec.block_ids) < last or num_tokens < spec.end:
        raise ValueError(
            f"{len(spec.block_ids)} blocks of {block_size} and {num_tokens} tokens cannot hold the "
            f"promised {spec.end} tokens"
        )
    slots = np.full(num_tokens, SKIP_SLOT, np.int64)
    first = spec.start // block_size
    wanted = slots[first * block_size : last * block_size]
    wanted[:] = block_slots(spec.block_ids[first:last], block_size)[: len(wanted)]
    return slots
