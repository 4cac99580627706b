"""RemoteBackend: the tier in a store that machines share (L3).

Its callers are the engine's threads; they wait only for loads and lookups, with a deadline. All
calls to the store are made by the threads of an :class:`~kvkeep.backends.io.pool.IOPool`, through a
connector (``base.py``). A lookup that pins answers for what it has fetched and verified into memory
of the CPU tier by then: the lease holds those objects, so the load that follows cannot fail (design
decision 4). Every failure is a miss, counted by cause; repeated ones open a breaker, and then
nobody waits for the store until a probe finds it working.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    BackendHealth,
    PutOutcome,
    StorageBackendInterface,
)
from kvkeep.backends.io.pinning import pin_loaded
from kvkeep.backends.io.pool import IOPool
from kvkeep.backends.lease import Lease
from kvkeep.backends.remote.base import RemoteConnector
from kvkeep.backends.remote.calls import StoreCalls
from kvkeep.backends.remote.condition import RemoteCondition
from kvkeep.backends.remote.known import BELIEVED_S, KnownChunks
from kvkeep.backends.remote.loads import RemoteLoads
from kvkeep.backends.remote.removal import RemoteRemoval
from kvkeep.backends.remote.reports import TIER, RemoteReports
from kvkeep.backends.remote.stores import RemoteStores, StoreRules
from kvkeep.backends.remote.value_names import name_prefix
from kvkeep.codec.base import Codec
from kvkeep.codec.frame import ChunkMeta, writer_digest
from kvkeep.identity import CacheIdentity
from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.batches import batched_unpin
from kvkeep.metrics import Metrics

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
        self._known = KnownChunks(believed_s=options.believed_s)
        self._calls = StoreCalls(connector, self._reports)
        self._pool = IOPool(
            name="remote",
            threads=options.threads,
            max_queued_bytes=options.queue_bytes,
            on_error=lambda: self._reports.fault("task", "internal"),
        )
        longest_s = max(options.load_timeout_s, options.store_timeout_s, options.lookup_timeout_s)
        self._condition = RemoteCondition(
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
