"""LocalDiskBackend: the tier on a local disk (L2), shared by all processes that use its directory.

Its callers are the engine's threads; they wait only for loads and lookups, with a deadline. All
file I/O runs in the threads of an :class:`~kvkeep.backends.io_pool.IOPool`. A lookup that pins
answers for what it has read and verified into memory of the CPU tier by then: the lease holds those
objects, so the load that follows cannot fail (design decision 4). Every failure is a miss, counted
by cause.

DiskOptions: what the disk tier is told. Plain values, usable from any thread.

DiskAvailability: whether the disk tier can be used now. Callable from any thread.

Its directory is opened in the background; one that cannot be opened is tried again. Stores can be
out alone: the disk is full, or read-only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    BackendHealth,
    Lease,
    PutOutcome,
    StorageBackendInterface,
    pin_loaded,
)
from kvkeep.backends.disk.catalog import Catalog
from kvkeep.backends.disk.chunk_files import ChunkReader, ChunkWriter
from kvkeep.backends.disk.directory import DiskDirectory
from kvkeep.backends.disk.files import FileIO, cause_of, concerns_medium
from kvkeep.backends.disk.index import TIER, DiskEntry, DiskIndex, DiskReports
from kvkeep.backends.disk.transfers import DiskLoads, DiskStores
from kvkeep.backends.io_pool import IOPool, WriteThrottle
from kvkeep.backends.slow_tier import CircuitBreaker, TierAvailability
from kvkeep.codec.base import Codec
from kvkeep.codec.lossless import RawCodec
from kvkeep.errors import BackendError
from kvkeep.hashing import ChunkKey
from kvkeep.identity import CacheIdentity
from kvkeep.memory.base import MemoryObj, batched_unpin
from kvkeep.metrics import Metrics
from kvkeep.policy.base import CachePolicy

_log = logging.getLogger(__name__)


class DiskAvailability(TierAvailability):
    """Opens and checks a catalog."""

    def __init__(
        self,
        catalog: Catalog,
        pool: IOPool,
        *,
        breakers: tuple[CircuitBreaker, CircuitBreaker],
        stall_timeout_s: float,
    ) -> None:
        """Not open yet; see the base class.

        Args:
            catalog: what is opened and checked.
            pool: where that runs.
            breakers: of loads, and of stores.
            stall_timeout_s: a call that runs for longer means that the medium hangs.
        """
        super().__init__(pool, breakers=breakers, stall_timeout_s=stall_timeout_s)
        self._catalog = catalog
        # Both are written by the one task that opens.
        self._is_open = False
        self._told = ""  # why it could not be opened, as the log has it

    @property
    def is_open(self) -> bool:
        """The directory was opened."""
        return self._is_open

    def _try_first(self) -> None:
        try:
            self._catalog.open()
        except (OSError, BackendError) as error:
            cause = cause_of(error) if isinstance(error, OSError) else "lock_timeout"
            self._catalog.reports.fault("open", cause)
            self.loads.trip()
            if str(error) != self._told:  # or each of many tries would say the same
                self._told = str(error)
                _log.warning("the disk tier cannot be opened: %s", error)
            return
        self._is_open = True
        self.loads.succeeded()

    def _try_again(self) -> None:
        if not self._is_open:
            self._try_first()
            return
        try:
            self._catalog.check()
        except OSError as error:
            self._catalog.reports.fault("check", cause_of(error))
            self.loads.failed()
        else:
            self.loads.succeeded()


_RAW = RawCodec()


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What the disk tier is told.

    Attributes:
        path: the directory; everything lies below ``path/kvkeep-disk-v1``.
        size_bytes: budget of the directory, over all processes that use it.
        codec: how chunks are written. Those of any codec are read.
        threads: threads for file I/O, at least 2.
        queue_bytes: most memory that stores which wait for the disk may hold.
        load_timeout_s: a load that takes longer is a miss.
        lookup_timeout_s: a lookup answers by then with what was read and verified.
        stall_timeout_s: with one call running for longer, the tier is left out until it ends.
        open_timeout_s: how long the start waits for the scan; it goes on in the background, and
            the tier takes part when it ends.
        clear_timeout_s: how long a clear waits for the removal of files, which goes on likewise.
        close_timeout_s: how long closing waits for queued stores.
    """

    path: Path
    size_bytes: int
    codec: Codec = _RAW
    threads: int = 4
    queue_bytes: int = 1 << 30
    load_timeout_s: float = 10.0
    lookup_timeout_s: float = 0.7
    stall_timeout_s: float = 5.0
    open_timeout_s: float = 5.0
    clear_timeout_s: float = 30.0
    close_timeout_s: float = 30.0


R = TypeVar("R")


__all__ = ["DiskOptions", "LocalDiskBackend"]


class LocalDiskBackend(StorageBackendInterface):
    """Chunks in files, found again after a restart."""

    name = TIER

    def __init__(
        self,
        options: DiskOptions,
        *,
        identity: CacheIdentity,
        allocator_backend: AllocatorBackendInterface,
        policy: CachePolicy[DiskEntry],
        metrics: Metrics,
        io: FileIO | None = None,
    ) -> None:
        """Open the directory. A directory that cannot be used is counted, and tried again later.

        Args:
            options: where, how much, how long.
            identity: the engine's; chunks of another one are never served.
            allocator_backend: whose memory loads fill and stores read.
            policy: order of eviction.
            metrics: where everything is counted.
            io: the system calls; a test may give failing ones.
        """
        self._options = options
        self._allocator_backend = allocator_backend
        self._reports = DiskReports(metrics)
        files = io if io is not None else FileIO()
        self._index = DiskIndex(policy)
        self._catalog = Catalog(
            DiskDirectory(options.path, budget_bytes=options.size_bytes, io=files),
            self._index,
            identity=identity,
            io=files,
            reports=self._reports,
        )
        breakers = CircuitBreaker(), CircuitBreaker()
        reader = ChunkReader(self._catalog, breakers[0])
        self._pool = IOPool(
            name="disk",
            threads=options.threads,
            max_queued_bytes=options.queue_bytes,
            on_error=lambda: self._reports.fault("task", "internal"),
        )
        self._loads = DiskLoads(
            allocator_backend, self._index, pool=self._pool, reader=reader, reports=self._reports
        )
        self._courtesy = WriteThrottle()
        self._stores = DiskStores(
            ChunkWriter(self._catalog, breakers[1], options.codec, self._courtesy),
            self._index,
            pool=self._pool,
            reports=self._reports,
            budget_bytes=options.size_bytes,
        )
        self._condition = DiskAvailability(
            self._catalog, self._pool, breakers=breakers, stall_timeout_s=options.stall_timeout_s
        )
        self._reports.watch(self._index, self._pool, breakers)
        self._wait(self._condition.open(), options.open_timeout_s, "open", cancel=False)

    # -- lookups -----------------------------------------------------------------------------

    def contains(self, key: ChunkKey, *, pin: Lease | None = None) -> bool:
        """See :meth:`batched_contains`."""
        return self.batched_contains([key], pin=pin) == 1

    def batched_contains(self, keys: Sequence[ChunkKey], *, pin: Lease | None = None) -> int:
        """Length of the run of chunks that can be read; with ``pin``, of those that were.

        Without ``pin`` this is the index's answer; the disk is asked only for a chunk that is not
        in it, since another process may have written it. With ``pin`` every chunk of the run is in
        memory, verified, offered to the CPU tier, and held by the lease. Waits at most
        ``lookup_timeout_s``, which counts from the opening of the lease: a prefix that is split
        into several runs has no more time than another.
        """
        if not keys or not self._condition.may_load():
            return 0
        opened = time.monotonic() if pin is None else pin.opened
        deadline = opened + self._options.lookup_timeout_s
        if pin is not None:
            deadline = min(deadline, pin.deadline)
        length = self._index.run_length(keys)
        if length < len(keys) and not self._index.is_known(keys[length]):
            self._wait(self._probe(keys[length:]), deadline - time.monotonic(), "lookup")
        length = self._run_length(keys)
        if pin is None or not length:
            return length
        with self._loads.load_run(keys[:length], deadline) as held:
            return self._pin(keys[: len(held.objects)], held.objects, pin)

    def batched_async_contains(self, keys: Sequence[ChunkKey]) -> Future[int]:
        """The answer without ``pin`` as a future, which cannot be cancelled. Nobody waits."""
        answer: Future[int] = Future()
        answer.set_running_or_notify_cancel()
        length = self._index.run_length(keys) if self._condition.may_load() else len(keys)
        if length == len(keys) or self._index.is_known(keys[length]):
            answer.set_result(self._run_length(keys) if self._condition.may_load() else 0)
            return answer

        def probed(done: Future[None]) -> None:
            self._wait(done, 0.0, "lookup")
            answer.set_result(self._run_length(keys))

        self._probe(keys[length:]).add_done_callback(probed)
        return answer

    def known_run(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the run of chunks in the index; what others have written since is unknown."""
        return self._index.run_length(keys) if self._condition.may_load() else 0

    def make_way(self) -> AbstractContextManager[None]:
        """Writes that are under way wait, chunk by chunk for a limited time. Loads do not."""
        return self._courtesy.busy()

    def _probe(self, keys: Sequence[ChunkKey]) -> Future[None]:
        """Ask the disk for what another process may have written, up to the first miss."""
        probe = partial(self._catalog.probe_all, keys, stop_at_miss=True)
        return self._pool.load(probe, first=True)

    def _run_length(self, keys: Sequence[ChunkKey]) -> int:
        """How many keys from the first on can be served; the rest is noted as missing."""
        length = self._index.run_length(keys)
        if length < len(keys):
            self._index.note_chain(keys[max(0, length - 1) :])
        return length

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
        """Give pins back, and note the chunks' use in reverse. Waits for no lock of this tier."""
        self._index.note_use([key for key, _ in entries])
        batched_unpin([obj for _, obj in entries])

    def touch_cache(self, keys: Sequence[ChunkKey]) -> None:
        """Note one use of each chunk, the last one first."""
        self._index.note_use(keys)

    def note_order(self, keys: Sequence[ChunkKey]) -> None:
        """Let these chunks of one prompt be evicted from the last one on."""
        self._index.note_order(keys)

    # -- loads -------------------------------------------------------------------------------

    def batched_get_blocking(self, keys: Sequence[ChunkKey]) -> list[MemoryObj | None]:
        """Chunks position by position; waits at most ``load_timeout_s``. Never raises."""
        if not keys or not self._condition.may_load():
            return [None] * len(keys)
        deadline = time.monotonic() + self._options.load_timeout_s
        probing = self._probe_unknown(keys)
        if probing is not None:
            self._wait(probing, deadline - time.monotonic(), "get")
        return self._loads.load_all(keys, deadline)

    def batched_get_non_blocking(self, keys: Sequence[ChunkKey]) -> Future[list[MemoryObj | None]]:
        """The same as a future, which cannot be cancelled: whoever asks takes the objects.

        Neither the caller nor an I/O thread waits.
        """
        answer: Future[list[MemoryObj | None]] = Future()
        answer.set_running_or_notify_cancel()
        if not keys or not self._condition.may_load():
            answer.set_result([None] * len(keys))
            return answer
        probing = self._probe_unknown(keys)
        if probing is None:
            self._loads.load_later(keys, answer)
        else:
            probing.add_done_callback(lambda _: self._loads.load_later(keys, answer))
        return answer

    def _probe_unknown(self, keys: Sequence[ChunkKey]) -> Future[None] | None:
        """Ask the disk for what another process may have written; None if there is no need."""
        unknown = [key for key in keys if not self._index.is_known(key)]
        if not unknown:
            return None
        return self._pool.load(
            lambda: self._catalog.probe_all(unknown, stop_at_miss=False), first=True
        )

    # -- stores ------------------------------------------------------------------------------

    def batched_submit_put_task(
        self,
        keys: Sequence[ChunkKey],
        objs: Sequence[MemoryObj],
        *,
        on_complete: Callable[[ChunkKey], None] | None = None,
    ) -> list[PutOutcome]:
        """Queue chunks for writing. Once the queue is full the rest of the batch is dropped, too.

        Raises:
            ValueError: there are not as many objects as keys.
        """
        if len(keys) != len(objs):
            raise ValueError(f"{len(keys)} keys for {len(objs)} objects")
        refusal = self._condition.why_no_stores()
        if refusal is not None:
            self._reports.refused(refusal)
            return [PutOutcome.DROPPED] * len(keys)
        return self._stores.submit(keys, objs, on_complete)

    # -- removal -----------------------------------------------------------------------------

    def remove(self, key: ChunkKey) -> bool:
        """Remove a chunk; see :meth:`batched_remove`."""
        return self.batched_remove([key]) == 1

    def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """Make chunks invisible at once and remove their files; returns how many there were."""
        hidden = [self._catalog.hide(key) for key in keys]
        served = [entry is not None and entry.ready and entry.mine for entry in hidden]
        task = self._pool.load(lambda: [self._catalog.discard_hidden(key) for key in keys])
        removed = self._wait(task, self._options.load_timeout_s, "remove")
        return sum(map(max, served, removed if removed is not None else served))

    def clear(self) -> int:
        """Remove every chunk of this engine. Those of other engines in the directory stay."""
        hidden = self._index.all_mine()
        for key in hidden:
            self._catalog.hide(key)
        task = self._pool.load(lambda: self._catalog.clear(hidden))
        return self._wait(task, self._options.clear_timeout_s, "clear") or 0

    # -- state -------------------------------------------------------------------------------

    def keys(self) -> list[ChunkKey]:
        """Every chunk of this engine that this process knows to be there."""
        return self._index.keys()

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """The CPU tier."""
        return self._allocator_backend

    def used_bytes(self) -> int | None:
        """Bytes used and reserved in the directory by all processes; None if it cannot be read."""
        task = self._pool.load(self._catalog.directory.used_bytes)
        return self._wait(task, self._options.load_timeout_s, "health")

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued is done; False if the time is over first."""
        return self._pool.wait_idle(timeout_s)

    def health(self) -> BackendHealth:
        """Whether chunks can be read. Where they could not, this also starts another try."""
        problem = self._condition.why_no_loads()
        if problem is None:
            return BackendHealth(True, f"{len(self._index)} chunks in {self._options.path}")
        self._condition.retry()
        return BackendHealth(False, problem)

    def close(self) -> None:
        """Write what is queued, within ``close_timeout_s``, and leave the directory."""
        if not self._condition.close():
            return
        self._pool.close(self._options.close_timeout_s)
        if self._condition.is_open:
            self._catalog.directory.close()

    def _wait(
        self, future: Future[R], timeout_s: float, operation: str, *, cancel: bool = True
    ) -> R | None:
        """The result of a task, or None: it came too late, failed, or the pool is closed."""
        try:
            return future.result(max(0.0, timeout_s))
        except TimeoutError:
            if cancel:
                future.cancel()
            self._reports.fault(operation, "timeout")
        except CancelledError:
            pass
        except OSError as error:
            self._reports.fault(operation, cause_of(error))
            if concerns_medium(error):
                self._condition.loads.failed()
        except BackendError:
            self._reports.fault(operation, "lock_timeout")
        return None
