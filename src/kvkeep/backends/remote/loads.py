"""RemoteLoads: which chunks are in the store, and having them read into memory.

The synchronous forms are called by the engine's threads, which wait with a deadline; the
asynchronous one waits nowhere. Chunks of one call travel in groups, several at a time, and each is
answered for as soon as it is verified. Every object that is not handed out is given back on every
path.

PresenceCache: what this process believes to be in the store, and what it is about to put there.

Only a hint: it saves storing the same chunk twice. The store is always asked before a chunk is
promised, and its answers correct the hint. A store may lose or drop chunks and is not asked while
everything is found in memory, so a hint ends by itself. Bounded; callable from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from kvkeep.backends.base import AllocatorBackendInterface
from kvkeep.backends.io_pool import IOPool
from kvkeep.backends.remote.base import HEADER_BYTES, RemoteReports, name_prefix, value_name
from kvkeep.backends.remote.calls import StoreCalls
from kvkeep.backends.remote.values import MISSING, NO_MEMORY, ChunkLoad, Clock, LoadRules
from kvkeep.backends.slow_tier import CircuitBreaker
from kvkeep.codec.frame import ChunkMeta
from kvkeep.errors import BackendError
from kvkeep.hashing import ChunkKey
from kvkeep.memory.base import MemoryObj, References, dtype_from_name

#: Chunks that are remembered, about 10 MB of memory.
MAX_KNOWN = 1 << 16
#: Seconds for which a hint is believed.
BELIEVED_S = 600.0


class Claim:
    """The right to store one chunk; taken back when the chunk is removed meanwhile."""


class PresenceCache:
    """Hints and claims."""

    def __init__(
        self,
        max_known: int = MAX_KNOWN,
        *,
        believed_s: float = BELIEVED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is known.

        Args:
            max_known: hints that are kept.
            believed_s: seconds for which each is believed.
            clock: seconds that only grow.
        """
        self._max_known = max_known
        self._believed_s = believed_s
        self._clock = clock
        self._lock = threading.Lock()
        # each with the end of its time; guarded by _lock
        self._known: OrderedDict[ChunkKey, float] = OrderedDict()
        self._claims: dict[ChunkKey, Claim] = {}  # guarded by _lock

    def claim(self, keys: Sequence[ChunkKey]) -> list[Claim | None]:
        """A claim for each chunk that is neither known nor claimed; a key twice gets one claim."""
        with self._lock:
            now = self._clock()
            return [self._claim_locked(key, now) for key in keys]

    def _claim_locked(self, key: ChunkKey, now: float) -> Claim | None:
        if self._known.get(key, now) > now or key in self._claims:
            return None
        self._claims[key] = claim = Claim()
        return claim

    def run_length(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the run of chunks that are known or claimed."""
        with self._lock:
            now = self._clock()
            for number, key in enumerate(keys):
                if self._known.get(key, now) <= now and key not in self._claims:
                    return number
        return len(keys)

    def has_seen(self, keys: Sequence[ChunkKey]) -> bool:
        """All of them were in the store, as far as this process knows; a claim is not enough."""
        with self._lock:
            now = self._clock()
            return all(self._known.get(key, now) > now for key in keys)

    def is_current(self, key: ChunkKey, claim: Claim) -> bool:
        """The claim was not taken back."""
        with self._lock:
            return self._claims.get(key) is claim

    def fulfil(self, key: ChunkKey, claim: Claim) -> bool:
        """The chunk is in the store; False if the claim was taken back before."""
        with self._lock:
            if self._claims.get(key) is not claim:
                return False
            del self._claims[key]
            self._note_locked(key)
            return True

    def give_up(self, key: ChunkKey, claim: Claim) -> None:
        """The chunk is not stored after all."""
        with self._lock:
            if self._claims.get(key) is claim:
                del self._claims[key]

    def saw(self, keys: Iterable[ChunkKey]) -> None:
        """The store said that it has these."""
        with self._lock:
            for key in keys:
                self._note_locked(key)

    def missed(self, keys: Iterable[ChunkKey]) -> None:
        """The store said that it does not have these. Claims stay."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """These are removed: hints go, claims are taken back."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
                self._claims.pop(key, None)

    def forget_all(self) -> None:
        """Everything is removed."""
        with self._lock:
            self._known.clear()
            self._claims.clear()

    def __len__(self) -> int:
        """Number of hints."""
        return len(self._known)

    def _note_locked(self, key: ChunkKey) -> None:
        self._known[key] = self._clock() + self._believed_s
        self._known.move_to_end(key)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)


_log = logging.getLogger(__name__)

#: What removing values that are no good may take, after the reader has been answered.
_REMOVE_TIMEOUT_S = 1.0


class RemoteLoads:
    """Lookups in and loads from one store."""

    def __init__(
        self,
        allocator_backend: AllocatorBackendInterface,
        calls: StoreCalls,
        known: PresenceCache,
        *,
        pool: IOPool,
        breaker: CircuitBreaker,
        reports: RemoteReports,
        identity: bytes,
        full: ChunkMeta,
        threads: int,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            allocator_backend: where memory comes from.
            calls: to the store.
            known: corrected by what the store answers.
            pool: where calls run.
            breaker: told how they do.
            reports: where misses and faults are counted.
            identity: digest that headers must have.
            full: a full chunk.
            threads: of ``pool``; a batch is split over them.
        """
        self._allocator_backend = allocator_backend
        self._calls = calls
        self._known = known
        self._pool = pool
        self._breaker = breaker
        self._reports = reports
        self._full = full
        self._threads = threads
        self._rules = LoadRules(identity, full, self._allocate_other, reports)
        self._prefix = name_prefix(identity)

    # -- what is there -----------------------------------------------------------------------

    def ask(self, keys: Sequence[ChunkKey], deadline: float) -> Future[list[bool]]:
        """Which chunks have a value of a possible size; one request, ahead of all loads."""
        return self._pool.load(partial(self._ask, keys, deadline), first=True)

    def _ask(self, keys: Sequence[ChunkKey], deadline: float) -> list[bool]:
        """The same, in an I/O thread. Values of an impossible size are removed."""
        names = [value_name(self._prefix, key) for key in keys]
        sizes = self._calls.sizes(names, deadline, self._breaker)
        most = HEADER_BYTES + self._full.size_bytes
        there = [HEADER_BYTES < size <= most for size in sizes]
        self._known.saw(key for key, found in zip(keys, there, strict=True) if found)
        self._known.missed(key for key, found in zip(keys, there, strict=True) if not found)
        bad = [index for index, size in enumerate(sizes) if size > 0 and not there[index]]
        for index in bad:
            self._reports.fault("lookup", "truncated" if sizes[index] <= HEADER_BYTES else "length")
        self._remove([names[index] for index in bad])
        return there

    # -- loads -------------------------------------------------------------------------------

    def load_run(self, keys: Sequence[ChunkKey], deadline: float) -> References:
        """The longest run from the first key on that is in memory, verified, by the deadline.

        What the CPU tier has is neither asked for nor read. Never waits for memory: the run ends
        where there is none.
        """
        held = References()
        with References(there := self._allocator_backend.batched_get_blocking(keys)):
            missing = [index for index, obj in enumerate(there) if obj is None]
            found = None
            if missing:
                asked = self.ask([keys[index] for index in missing], deadline)
                found = self.wait(asked, deadline)
            present = set(_run(missing, found)) if found else set()
            wanted = [index for index in missing if index in present]
            loads = self._start(keys, wanted, deadline, wait=False)
            try:
                for index, kept in enumerate(there):
                    obj = self._take(loads.pop(index, None), deadline) if kept is None else kept
                    if obj is None:
                        break
                    if kept is not None:
                        kept.ref_count_up()
                    held.adopt([obj])
            finally:
                _abandon(loads)
        return held

    def load_all(self, keys: Sequence[ChunkKey], deadline: float) -> list[MemoryObj | None]:
        """Every chunk that is read and verified by the deadline, at its position."""
        found = self.wait(self._ask_first(keys, deadline), deadline) or []
        wanted = [index for index, is_there in enumerate(found) if is_there]
        loads = self._start(keys, wanted, deadline, wait=True)
        return [self._take(loads.pop(index, None), deadline) for index in range(len(keys))]

    def load_later(
        self, keys: Sequence[ChunkKey], answer: Future[list[MemoryObj | None]], deadline: float
    ) -> None:
        """The same without waiting: ``answer`` gets the result when the last load is over."""

        def start(asked: Future[list[bool]]) -> None:
            try:
                found = [] if asked.cancelled() or asked.exception() else asked.result()
                wanted = [index for index, is_there in enumerate(found) if is_there]
                loads = self._start(keys, wanted, deadline, wait=False)
            except Exception:  # noqa: BLE001  the top of this task: it is counted, and all misses
                self._reports.fault("get", "internal")
                _log.exception("a load of the remote tier failed")
                loads = {}
            _when_over(loads, lambda: answer.set_result(_collect(loads, len(keys))))

        self._ask_first(keys, deadline).add_done_callback(start)

    def _ask_first(self, keys: Sequence[ChunkKey], deadline: float) -> Future[list[bool]]:
        """Which chunks to load: all of them where nothing would be learned, or nothing saved.

        A store that has said before that it has them is not asked again, and where asking costs as
        much as a load that misses, it is not asked at all.
        """
        if self._calls.connector.sizes_at_once and not self._known.has_seen(keys):
            return self.ask(keys, deadline)
        all_of_them: Future[list[bool]] = Future()
        all_of_them.set_result([True] * len(keys))
        return all_of_them

    def wait(self, asked: Future[list[bool]], deadline: float) -> list[bool] | None:
        """The store's answer; None if there is none by the deadline. Failures were counted."""
        try:
            return asked.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            asked.cancel()
            self._reports.fault("lookup", "timeout")
        except (CancelledError, BackendError):
            pass
        return None

    def _start(
        self, keys: Sequence[ChunkKey], wanted: Sequence[int], deadline: float, *, wait: bool
    ) -> dict[int, ChunkLoad]:
        """Start loads of the chunks at these positions, as many of the first as find memory."""
        objs = self._allocate(len(wanted), keys, wait=wait)
        loads: dict[int, ChunkLoad] = {}
        for index, obj in zip(wanted, objs, strict=False):
            key = keys[index]
            loads[index] = ChunkLoad(value_name(self._prefix, key), key, obj, self._rules)
        for _ in range(len(wanted) - len(objs)):
            self._reports.fault("get", NO_MEMORY)
        queue = list(loads.values())
        most = self._calls.connector.max_values_per_call
        size = min(most, -(-len(queue) // self._threads)) or 1
        for start in range(0, len(queue), size):
            group = queue[start : start + size]
            task = self._pool.load(partial(self._read, group, deadline))
            task.add_done_callback(partial(_end_all, group))
        return loads

    def _read(self, group: Sequence[ChunkLoad], deadline: float) -> None:
        """One request, in an I/O thread."""
        clock = Clock()
        for load in group:
            load.clock = clock
            if load.future.cancelled():
                load.end("cancelled")
        wanted = [load for load in group if not load.is_over]
        cause = "failed"
        try:
            if wanted:
                cause = self._calls.get(wanted, deadline, self._breaker)
        except BackendError:
            pass  # it was counted
        for load in wanted:
            load.end(cause)
        self._note_misses(wanted)

    def _note_misses(self, loads: Sequence[ChunkLoad]) -> None:
        """Count loads that failed on their own, and remove values that are no good."""
        for load in loads:
            if load.cause not in (None, "failed", "timeout"):
                self._reports.fault("get", str(load.cause))
        self._known.missed(load.key for load in loads if load.is_bad or load.cause == MISSING)
        self._remove([load.name for load in loads if load.is_bad])

    def _remove(self, names: Sequence[str]) -> None:
        """Remove values. A failure is counted, and left to the next reader."""
        with contextlib.suppress(BackendError):
            if names:
                self._calls.remove(names, time.monotonic() + _REMOVE_TIMEOUT_S)

    def _take(self, load: ChunkLoad | None, deadline: float) -> MemoryObj | None:
        """The chunk of a load, with one reference for the caller, if it is in by the deadline."""
        if load is None:
            return None
        try:
            return load.future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if not load.future.cancel():
                return load.future.result()  # it came this very moment
            self._reports.fault("get", "timeout")
        except CancelledError:
            pass
        return None

    # -- memory ------------------------------------------------------------------------------

    def _allocate(self, count: int, keys: Sequence[ChunkKey], *, wait: bool) -> list[MemoryObj]:
        """Memory for as many of ``count`` chunks as there is, without evicting those of ``keys``.

        All at once or not at all while it waits (fault 26); after that what fits.
        """
        objs: list[MemoryObj] = []
        step = count
        while step and len(objs) < count:
            step = min(step, count - len(objs))
            some = self._allocator_backend.batched_allocate(
                self._full.shape,
                dtype_from_name(self._full.dtype),
                step,
                self._full.fmt,
                busy_loop=wait and not objs,
                protect=keys,
            )
            wait = False
            if some is None:
                step //= 2
            else:
                objs += some
        return objs

    def _allocate_other(self, meta: ChunkMeta) -> MemoryObj | None:
        """Memory for a chunk that is not full, without waiting."""
        return self._allocator_backend.allocate(
            meta.shape, dtype_from_name(meta.dtype), meta.fmt, busy_loop=False
        )


def _run(indexes: Sequence[int], found: Sequence[bool]) -> Sequence[int]:
    """Of these positions, those before the first that was not found."""
    return indexes[: found.index(False)] if False in found else indexes


def _end_all(group: Sequence[ChunkLoad], task: Future[None]) -> None:
    """The task is over, or was never begun because the pool is closed."""
    for load in group:
        load.end("closed" if task.cancelled() else "failed")


def _abandon(loads: dict[int, ChunkLoad]) -> None:
    """Nobody waits for these any more; what has come already is given back."""
    for load in loads.values():
        if not load.future.cancel():
            References([load.future.result()]).release()


def _collect(loads: dict[int, ChunkLoad], count: int) -> list[MemoryObj | None]:
    """The results of loads that are over, position by position."""
    return [loads[index].future.result() if index in loads else None for index in range(count)]


def _when_over(loads: dict[int, ChunkLoad], callback: Callable[[], None]) -> None:
    """Call back once, when every load is over; at once if there is none."""
    lock = threading.Lock()
    waiting = len(loads)

    def one_is_over(_: object) -> None:
        nonlocal waiting
        with lock:
            waiting -= 1
            is_last = waiting == 0
        if is_last:
            callback()

    if not loads:
        callback()
    for load in list(loads.values()):
        load.future.add_done_callback(one_is_over)
