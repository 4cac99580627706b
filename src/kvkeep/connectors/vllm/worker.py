"""The worker side: carries out loads before a forward pass and saves after it.

Worker process only. ``load`` and ``save`` are called from the engine's thread; lookups arrive on
the lookup server's own thread meanwhile. Nothing here raises for what the cache cannot do: a load
that fails is reported block by block, a save that fails is counted.

BackgroundLoads: loads that run between a worker's steps instead of before one.

One thread, in the order in which the loads were planned, so that all ranks load in one order. Every
load that was handed in comes out again once, whatever becomes of it: vLLM waits for that.

Cores: which processor cores a worker's threads may use.

On the CPU, vLLM binds the worker's own thread to one core and its others to one each, and a thread
starts with the cores of the one that starts it. So kvkeep's threads would all share one core with
the engine's, which spins there while it waits. Threads that are started within ``all_of_them`` may
use every core that the engine gave this worker, and so may the engine's thread until it has ended.

StepClock: how long the engine computes prompts, step by step. Engine's thread only.

CountedResets: the engine as the lookup server sees it, with a count of how often it was cleared.

Worker process only; called from the lookup server's threads, the count from the engine's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.connectors.vllm.messages import LoadSpec, SaveSpec, StepMeta, WorkerMeta
from kvkeep.connectors.vllm.stats import KVKeepStats, StepStats
from kvkeep.engine.build import CacheManager
from kvkeep.engine.engine import CacheEngine, CheckReport
from kvkeep.engine.results import FoundTokens
from kvkeep.errors import KVKeepError
from kvkeep.gpu.base import SKIP_SLOT
from kvkeep.hashing import TOKEN_BYTES
from kvkeep.identity import CacheIdentity
from kvkeep.lookup.server import LookupServer
from kvkeep.tokens import RequestScope

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that it is shown

#: How long closing waits for a load that is under way.
CLOSE_TIMEOUT_S = 10.0


class BackgroundLoads:
    """A thread for loads; it starts with the first one."""

    def __init__(self, load: Callable[[LoadSpec], int]) -> None:
        """No thread yet.

        Args:
            load: carries a load out, and returns the token up to which all is there. Must not
                raise.
        """
        self._load = load
        self._wake = threading.Condition()
        self._waiting: deque[LoadSpec] = deque()  # guarded by _wake
        self._done: list[tuple[LoadSpec, int]] = []  # guarded by _wake
        self._closed = False  # guarded by _wake
        self._thread: threading.Thread | None = None  # guarded by _wake

    def submit(self, spec: LoadSpec) -> bool:
        """Queue a load.

        Returns:
            False if it is over at once, with nothing loaded: after the close, or where the system
            has no thread to give. Its lease is the caller's then.
        """
        with self._wake:
            if self._closed or not self._has_thread_locked():
                self._done.append((spec, spec.start))
                return False
            self._waiting.append(spec)
            self._wake.notify()
            return True

    def _has_thread_locked(self) -> bool:
        """There is a thread, or one could be started."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvkeep-load", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("no thread for loads between steps: %s", error)
                return False
            self._thread = thread
        return True

    def take_done(self) -> list[tuple[LoadSpec, int]]:
        """Loads that have ended since the last call, and the token up to which all is there."""
        with self._wake:
            done, self._done = self._done, []
            return done

    def close(self) -> None:
        """End the load under way and drop the others; a second call does nothing."""
        with self._wake:
            self._closed = True
            self._done += [(spec, spec.start) for spec in self._waiting]
            self._waiting.clear()
            self._wake.notify()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """The thread."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                spec = self._waiting.popleft()
            loaded_to = self._load(spec)
            with self._wake:
                self._done.append((spec, loaded_to))


_THREADS = Path("/proc/self/task")


class Cores:
    """The cores of this process's threads, taken when it is made. Engine's thread only."""

    def __init__(self) -> None:
        """Look at the threads that there are; without ``sched_getaffinity`` there is one set."""
        self._own: set[int] = set()
        self._all: set[int] = set()
        if hasattr(os, "sched_getaffinity"):
            self._own = self._all = os.sched_getaffinity(0)
            for thread in _THREADS.iterdir() if _THREADS.exists() else ():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    self._all = self._all | os.sched_getaffinity(int(thread.name))

    @contextlib.contextmanager
    def all_of_them(self) -> Iterator[None]:
        """Let this thread, and those that it starts, use all of the worker's cores."""
        if self._own == self._all:
            yield
            return
        _bind(self._all)
        try:
            yield
        finally:
            _bind(self._own)


def _bind(cores: set[int]) -> None:
    with contextlib.suppress(OSError):  # they were taken away: a load must not fail for that
        os.sched_setaffinity(0, cores)


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
        """See :meth:`kvkeep.engine.engine.CacheEngine.lookup`."""
        return self._engine.lookup(
            tokens, lookup_id=lookup_id, pin=pin, scope=scope, counted=counted
        )

    def async_lookup(
        self, tokens: object, *, lookup_id: str, scope: RequestScope, counted: bool
    ) -> Future[FoundTokens]:
        """See :meth:`kvkeep.engine.engine.CacheEngine.async_lookup`."""
        return self._engine.async_lookup(tokens, lookup_id=lookup_id, scope=scope, counted=counted)

    def lookup_unpin(self, lookup_id: str) -> object:
        """See :meth:`kvkeep.engine.engine.CacheEngine.lookup_unpin`."""
        return self._engine.lookup_unpin(lookup_id)

    def lookup_keep(self, lookup_id: str, num_tokens: int) -> None:
        """See :meth:`kvkeep.engine.engine.CacheEngine.lookup_keep`."""
        self._engine.lookup_keep(lookup_id, num_tokens)

    def check(self) -> CheckReport:
        """See :meth:`kvkeep.engine.engine.CacheEngine.check`."""
        return self._engine.check()

    def clear(self, locations: Collection[str] | None = None) -> int:
        """See :meth:`kvkeep.engine.engine.CacheEngine.clear`."""
        if locations is None:
            with self._lock:
                self._num_resets += 1  # first: a save that starts now must not outlive the reset
        return self._engine.clear(locations)


class StepClock:
    """Measures from the end of a step's loads to the end of its forward pass."""

    def __init__(self, note: Callable[[int, float], None], *, runs_ahead: bool) -> None:
        """No step has begun.

        Args:
            note: called with the tokens of prompts that a step computed, and its seconds.
            runs_ahead: the device computes behind the thread, so only what is copied out of it
                waits for the forward pass; steps without saves are then not measured.
        """
        self._note = note
        self._runs_ahead = runs_ahead
        self._started: float | None = None

    def loads_ended(self) -> None:
        """The forward pass begins."""
        self._started = time.perf_counter()

    def pass_ended(self, meta: StepMeta) -> None:
        """The engine's thread is through with the forward pass."""
        if not self._runs_ahead:
            self._take(meta)

    def saves_ended(self, meta: StepMeta) -> None:
        """What the step has completed was copied out."""
        if self._runs_ahead and meta.saves:
            self._take(meta)

    def _take(self, meta: StepMeta) -> None:
        if self._started is not None and meta.prefill_tokens:
            self._note(meta.prefill_tokens, time.perf_counter() - self._started)
        self._started = None


# a child of vLLM's, so that it is shown


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
