"""RemoteBackend: the tier in a store that machines share (L3).

Its callers are the engine's threads; they wait only for loads and lookups, with a deadline. All
calls to the store are made by the threads of an :class:`~kvkeep.backends.io_pool.IOPool`, through a
connector (``base.py``). A lookup that pins answers for what it has fetched and verified into memory
of the CPU tier by then: the lease holds those objects, so the load that follows cannot fail (design
decision 4). Every failure is a miss, counted by cause; repeated ones open a breaker, and then
nobody waits for the store until a probe finds it working.

RemoteAvailability: whether the store can be used now. Callable from any thread.

Stores can be out alone: the store refuses them, or has no room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    BackendHealth,
    Lease,
    PutOutcome,
    StorageBackendInterface,
    pin_loaded,
)
from kvkeep.backends.io_pool import IOPool
from kvkeep.backends.remote.base import (
    LIST_BATCH,
    TIER,
    RemoteConnector,
    RemoteReports,
    key_of,
    name_prefix,
    value_name,
)
from kvkeep.backends.remote.calls import StoreCalls
from kvkeep.backends.remote.loads import BELIEVED_S, PresenceCache, RemoteLoads
from kvkeep.backends.remote.stores import RemoteStores, StoreRules
from kvkeep.backends.slow_tier import CircuitBreaker, TierAvailability
from kvkeep.codec.base import Codec
from kvkeep.codec.frame import (
    ChunkMeta,
    writer_digest,
)
from kvkeep.errors import BackendError
from kvkeep.hashing import ChunkKey
from kvkeep.identity import CacheIdentity
from kvkeep.memory.base import MemoryObj, batched_unpin
from kvkeep.metrics import Metrics


class RemoteAvailability(TierAvailability):
    """Asks the store whether it answers.

    Attributes:
        refusals: open while a store that works takes nothing.
    """

    def __init__(
        self, calls: StoreCalls, pool: IOPool, *, probe_timeout_s: float, stall_timeout_s: float
    ) -> None:
        """Take it that the store works.

        Args:
            calls: to the store.
            pool: where probes run.
            probe_timeout_s: what a probe may take.
            stall_timeout_s: a call that runs for longer does not keep its deadline.
        """
        super().__init__(
            pool, breakers=(CircuitBreaker(), CircuitBreaker()), stall_timeout_s=stall_timeout_s
        )
        self._calls = calls
        self.refusals = CircuitBreaker()
        self._probe_timeout_s = probe_timeout_s

    def why_no_stores(self) -> str | None:
        """As without refusals; and ``store_refuses``, but for one try per pause."""
        problem = super().why_no_stores()
        if problem is None and not self.refusals.allows():
            problem = "store_refuses"
        return problem

    def _try_first(self) -> None:
        """A store that does not answer at the start is left alone at once."""
        if not self._answers():
            self.loads.trip()

    def _try_again(self) -> None:
        self._answers()

    def _answers(self) -> bool:
        """Ask whether the store answers; the breaker is told by the call."""
        try:
            self._calls.ping(time.monotonic() + self._probe_timeout_s, self.loads)
        except BackendError:
            return False  # it was counted
        return True


R = TypeVar("R")

#: A call that runs so much longer than any deadline does not keep it.
_STALL_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """What the remote tier is told.

    Attributes:
        threads: threads for calls to the store, at least 2.
        queue_bytes: most memory that stores which wait for the store may hold.
        load_timeout_s: a load that takes longer is a miss.
        store_timeout_s: a group of chunks that takes longer to store is dropped.
        lookup_timeout_s: a lookup answers by then with what was fetched and verified.
        probe_timeout_s: a store that takes longer to answer a probe is still failing.
        clear_timeout_s: what removing all chunks may take.
        close_timeout_s: how long closing waits for queued stores.
        believed_s: a chunk that is stored anew is not sent again so long after the store had it.
    """

    threads: int = 4
    queue_bytes: int = 1 << 30
    load_timeout_s: float = 10.0
    store_timeout_s: float = 10.0
    lookup_timeout_s: float = 0.7
    probe_timeout_s: float = 1.0
    clear_timeout_s: float = 60.0
    close_timeout_s: float = 10.0
    believed_s: float = BELIEVED_S


class RemoteBackend(StorageBackendInterface):
    """Chunks in a store that outlives this machine."""

    name = TIER

    def __init__(
        self,
        connector: RemoteConnector,
        options: RemoteOptions,
        *,
        identity: CacheIdentity,
        full_chunk: ChunkMeta,
        codec: Codec,
        allocator_backend: AllocatorBackendInterface,
        metrics: Metrics,
    ) -> None:
        """Use a store. One that does not answer is counted, and tried again later.

        Args:
            connector: to the store; this object's from now on.
            options: how much, how long.
            identity: the engine's; chunks of another one are never served.
            full_chunk: what a full chunk of the engine is.
            codec: how chunks are stored. Those of any codec are read.
            allocator_backend: whose memory loads fill and stores read.
            metrics: where everything is counted.
        """
        digest = writer_digest(identity)
        self._options = options
        self._connector = connector
        self._allocator_backend = allocator_backend
        self._reports = RemoteReports(metrics)
        self._known = PresenceCache(believed_s=options.believed_s)
        self._calls = StoreCalls(connector, self._reports)
        self._pool = IOPool(
            name="remote",
            threads=options.threads,
            max_queued_bytes=options.queue_bytes,
            on_error=lambda: self._reports.fault("task", "internal"),
        )
        longest_s = max(options.load_timeout_s, options.store_timeout_s, options.lookup_timeout_s)
        self._condition = RemoteAvailability(
            self._calls,
            self._pool,
            probe_timeout_s=options.probe_timeout_s,
            stall_timeout_s=longest_s + _STALL_MARGIN_S,
        )
        self._loads = RemoteLoads(
            allocator_backend,
            self._calls,
            self._known,
            pool=self._pool,
            breaker=self._condition.loads,
            reports=self._reports,
            identity=digest,
            full=full_chunk,
            threads=options.threads,
        )
        self._stores = RemoteStores(
            self._calls,
            self._known,
            StoreRules(digest, full_chunk, codec, options.store_timeout_s),
            pool=self._pool,
            breakers=(self._condition.loads, self._condition.stores, self._condition.refusals),
            reports=self._reports,
        )
        self._removal = RemoteRemoval(
            self._calls,
            name_prefix(digest),
            pool=self._pool,
            breaker=self._condition.loads,
            reports=self._reports,
            timeouts_s=(options.load_timeout_s, options.clear_timeout_s),
        )
        self._reports.watch(self._pool, self._condition.loads, self._condition.stores)
        self._condition.open()

    # -- lookups -----------------------------------------------------------------------------

    def contains(self, key: ChunkKey, *, pin: Lease | None = None) -> bool:
        """See :meth:`batched_contains`."""
        return self.batched_contains([key], pin=pin) == 1

    def batched_contains(self, keys: Sequence[ChunkKey], *, pin: Lease | None = None) -> int:
        """Length of the run of chunks that the store has; with ``pin``, of those fetched by then.

        The store is asked once. With ``pin`` every chunk of the run is in memory, verified, offered
        to the CPU tier, and held by the lease. Waits at most ``lookup_timeout_s``, which counts
        from the opening of the lease: a prefix that is split into several runs, or that another
        tier was asked for before, has no more time than another.
        """
        if not keys or not self._condition.may_load():
            return 0
        opened = time.monotonic() if pin is None else pin.opened
        deadline = opened + self._options.lookup_timeout_s
        if pin is None:
            return _run_length(self._loads.wait(self._loads.ask(keys, deadline), deadline))
        with self._loads.load_run(keys, min(deadline, pin.deadline)) as held:
            return self._pin(keys[: len(held.objects)], held.objects, pin)

    def known_run(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the run of chunks that were stored or seen by this process lately."""
        return self._known.run_length(keys) if self._condition.may_load() else 0

    def batched_async_contains(self, keys: Sequence[ChunkKey]) -> Future[int]:
        """Length of the run of chunks that the store has, as a future that never raises."""
        answer: Future[int] = Future()
        answer.set_running_or_notify_cancel()
        if not keys or not self._condition.may_load():
            answer.set_result(0)
            return answer

        def finish(asked: Future[list[bool]]) -> None:
            has_failed = asked.cancelled() or asked.exception() is not None
            answer.set_result(0 if has_failed else _run_length(asked.result()))

        deadline = time.monotonic() + self._options.load_timeout_s
        self._loads.ask(keys, deadline).add_done_callback(finish)
        return answer

    def _pin(self, keys: Sequence[ChunkKey], objs: Sequence[MemoryObj], lease: Lease) -> int:
        """Give pins on loaded objects to a lease, and the objects to the CPU tier."""
        return pin_loaded(
            self,
            keys,
            objs,
            lease,
            allocator_backend=self._allocator_backend,
            fault=self._reports.fault,
        )

    def batched_unpin(self, entries: Sequence[tuple[ChunkKey, MemoryObj]]) -> None:
        """Give pins back. The store has its own order of eviction, which reading has noted."""
        batched_unpin([obj for _, obj in entries])

    # -- loads -------------------------------------------------------------------------------

    def batched_get_blocking(self, keys: Sequence[ChunkKey]) -> list[MemoryObj | None]:
        """Chunks position by position; waits at most ``load_timeout_s``. Never raises."""
        if not keys or not self._condition.may_load():
            return [None] * len(keys)
        return self._loads.load_all(keys, time.monotonic() + self._options.load_timeout_s)

    def batched_get_non_blocking(self, keys: Sequence[ChunkKey]) -> Future[list[MemoryObj | None]]:
        """The same as a future, which cannot be cancelled: whoever asks takes the objects.

        Neither the caller nor an I/O thread waits.
        """
        answer: Future[list[MemoryObj | None]] = Future()
        answer.set_running_or_notify_cancel()
        if not keys or not self._condition.may_load():
            answer.set_result([None] * len(keys))
        else:
            deadline = time.monotonic() + self._options.load_timeout_s
            self._loads.load_later(keys, answer, deadline)
        return answer

    # -- stores ------------------------------------------------------------------------------

    def batched_submit_put_task(
        self,
        keys: Sequence[ChunkKey],
        objs: Sequence[MemoryObj],
        *,
        on_complete: Callable[[ChunkKey], None] | None = None,
    ) -> list[PutOutcome]:
        """Queue chunks for storing. Once the queue is full the rest of the batch is dropped, too.

        Raises:
            ValueError: there are not as many objects as keys.
        """
        if len(keys) != len(objs):
            raise ValueError(f"{len(keys)} keys for {len(objs)} objects")
        refusal = self._condition.why_no_stores() if keys else None
        if refusal is not None:
            self._reports.fault("put", refusal)
            return [PutOutcome.DROPPED] * len(keys)
        return self._stores.submit(keys, objs, on_complete)

    # -- removal -----------------------------------------------------------------------------

    def remove(self, key: ChunkKey) -> bool:
        """Remove a chunk; see :meth:`batched_remove`."""
        return self.batched_remove([key]) == 1

    def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove values from the store, for everybody; returns how many there were."""
        self._known.forget(keys)
        return self._removal.remove(keys) if keys and self._condition.may_load() else 0

    def clear(self) -> int:
        """Remove every chunk of this identity from the store, for everybody who uses it.

        Raises:
            BackendError: the store failed, or it took too long; some chunks may be there still.
        """
        self._known.forget_all()
        return 0 if self._condition.is_closed else self._removal.clear()

    # -- state -------------------------------------------------------------------------------

    def keys(self) -> list[ChunkKey]:
        """Every chunk of this identity in the store, as far as it says so in time."""
        return self._removal.keys() if self._condition.may_load() else []

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """The CPU tier."""
        return self._allocator_backend

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is done; False if the time is over first."""
        return self._pool.wait_idle(timeout_s)

    def health(self) -> BackendHealth:
        """Whether chunks can be read. Where they could not, this also starts another try."""
        problem = self._condition.why_no_loads()
        if problem is None:
            return BackendHealth(True, self._connector.description)
        self._condition.retry()
        why = f" ({self._reports.last_error})" if self._reports.last_error else ""
        return BackendHealth(False, f"{self._connector.description}: {problem}{why}")

    def close(self) -> None:
        """Store what is queued, within ``close_timeout_s``, and leave the store."""
        if self._condition.close():
            self._pool.close(self._options.close_timeout_s)
            self._connector.close()


def _run_length(found: Sequence[bool] | None) -> int:
    """How many of the first chunks are there."""
    if not found:
        return 0
    return found.index(False) if False in found else len(found)


class RemoteRemoval:
    """Removes and lists the values of one writer."""

    def __init__(
        self,
        calls: StoreCalls,
        prefix: str,
        *,
        pool: IOPool,
        breaker: CircuitBreaker,
        reports: RemoteReports,
        timeouts_s: tuple[float, float],
    ) -> None:
        """Remove nothing yet.

        Args:
            calls: to the store.
            prefix: of the writer's names.
            pool: where calls run.
            breaker: told how going through all does.
            reports: where late ones are counted.
            timeouts_s: of removing some chunks, and of going through all.
        """
        self._calls = calls
        self._prefix = prefix
        self._pool = pool
        self._breaker = breaker
        self._reports = reports
        self._some_s, self._all_s = timeouts_s

    def remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks; returns how many there were, as far as the store said so in time."""
        names = iter([value_name(self._prefix, key) for key in dict.fromkeys(keys)])
        return self._remove_all(names, time.monotonic() + self._some_s, "remove")[0]

    def clear(self) -> int:
        """Remove everything.

        Raises:
            BackendError: not everything was removed.
        """
        removed, is_done = self._remove_all(self._names(), time.monotonic() + self._all_s, "clear")
        if not is_done:
            raise BackendError(f"stopped after {removed} chunks", backend=TIER, operation="clear")
        return removed

    def keys(self) -> list[ChunkKey]:
        """Every chunk."""
        deadline = time.monotonic() + self._all_s
        names, found = self._names(), set()
        while some := self._wait(lambda: list(islice(names, LIST_BATCH)), deadline, "list"):
            found.update(some)
        keys = [key_of(self._prefix, name) for name in found]
        return [key for key in keys if key is not None]

    def _remove_all(
        self, names: Iterator[str], deadline: float, operation: str
    ) -> tuple[int, bool]:
        """Remove piece by piece; how many there were, and whether all were asked for."""
        removed = 0

        def remove_some() -> int:
            """The number of values that there were; -1 at the end."""
            batch = list(islice(names, LIST_BATCH))
            if not batch:
                return -1
            return sum(self._calls.remove(batch, deadline))

        while True:
            done = self._wait(remove_some, deadline, operation)
            if done is None or done < 0:
                return removed, done is not None
            removed += done

    def _names(self) -> Iterator[str]:
        return self._calls.names(self._prefix, self._some_s, self._breaker)

    def _wait(self, run: Callable[[], R], deadline: float, operation: str) -> R | None:
        """The result of a task for an I/O thread, or None: it came too late, failed, or closed."""
        task = self._pool.load(run)
        try:
            return task.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            task.cancel()
            self._reports.fault(operation, "timeout")
        except (CancelledError, BackendError):
            pass  # counted where it was raised
        return None
