"""Prefetcher: lookups whose chunks travel from slow tiers into memory before they are answered.

A lookup is answered exactly once, whatever happens to it: it ends, its deadline passes (then with
the part that has arrived), it is given up, something raises, or everything is closed. What is
answered for is in memory, verified, and held by the lookup's lease; everything else that came is
given back at once. Callable from any thread; nothing here waits but ``claim`` and ``close``.

PrefetchBudget: how many chunks all prefetches together may hold in memory.

A prefetch takes its room whole before it holds anything, or waits, first come, first served. So two
of them never hold half of it each and wait for the rest (fault 26). Used in the I/O thread only.

PrefetchTask: brings the chunks of one prompt into memory, from the first on, and pins them.

A prefix may lie in several tiers, and somebody else may be bringing parts of it already::

    chunk      |  0  |  1  |  2  |  3  |  4  |  5  |
    where      | L1  | L1  | disk| disk| L1  |remote|
    position         ->          pinned up to here; what follows is asked for, a few chunks ahead

Everything here runs in the I/O thread. What a task holds belongs to its lease, and the lease
holds a prefix without gaps whenever the task is stopped.

Fetch: chunks on their way from a slow tier, owned until somebody takes them.

A tier's answer cannot be stopped once it was asked for. So what arrives belongs to this object: it
is handed over once, or given back the moment it arrives after all interest in it has ended. Started
and awaited in the I/O thread; answers arrive in any thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvkeep.backends.base import AllocatorBackendInterface, Lease, StorageBackendInterface
from kvkeep.hashing import ChunkKey
from kvkeep.memory.base import MemoryObj, References
from kvkeep.metrics import Metrics
from kvkeep.prefix import LocatedRun
from kvkeep.storage.cost import LoadCostModel
from kvkeep.storage.leases import EventManager, EventStatus, EventType, LeaseTable
from kvkeep.storage.runtime import CallThreads, IORuntime
from kvkeep.storage.tiers import BackendGuard, Tiers
from kvkeep.storage.transfer import Transfer

T = TypeVar("T")


class Fetch:
    """One batch of chunks under way.

    Attributes:
        keys: the chunks.
    """

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing has been asked for yet."""
        self.keys = keys
        self._lock = threading.Lock()
        self._objs: list[MemoryObj | None] | None = None  # guarded by _lock
        self._abandoned = False  # guarded by _lock
        self._arrived: Future[None] = Future()
        self._arrived.set_running_or_notify_cancel()  # whoever stops waiting cancels nothing

    def deliver(self, objs: list[MemoryObj | None]) -> None:
        """The tier's answer, with a reference to each object, position by position."""
        with self._lock:
            late = self._abandoned
            if not late:
                self._objs = objs
        if late:
            References(objs).release()
        self._arrived.set_result(None)

    async def take(self) -> list[MemoryObj | None]:
        """Wait for the answer; its references are the caller's from then on."""
        await asyncio.wrap_future(self._arrived)
        with self._lock:
            objs, self._objs = self._objs, None
        return objs or []

    def abandon(self) -> None:
        """Give back what is there, and what arrives later, as it does."""
        with self._lock:
            self._abandoned = True
            objs, self._objs = self._objs, None
        References(objs or ()).release()


class TierCaller:
    """Asks one slow tier, and never waits for it: faults and refused calls are misses."""

    def __init__(
        self, backend: StorageBackendInterface, guard: BackendGuard, threads: CallThreads
    ) -> None:
        """Ask ``backend`` through ``guard``; what may block runs in ``threads``."""
        self.backend = backend
        self._guard = guard
        self._threads = threads
        kind = type(backend)
        plain = StorageBackendInterface
        self._may_block_at_get = kind.batched_get_non_blocking is plain.batched_get_non_blocking
        self._may_block_at_contains = kind.batched_async_contains is plain.batched_async_contains

    async def count(self, keys: Sequence[ChunkKey]) -> int:
        """How many chunks from the first on the tier says that it has."""
        answer: Future[int] = Future()
        answer.set_running_or_notify_cancel()

        def answered(future: Future[int]) -> None:
            answer.set_result(self._guard.count(self.backend, len(keys), future.result))

        def ask() -> None:
            start = partial(self.backend.batched_async_contains, keys)
            self._listen("contains", start, answered, lambda: answer.set_result(0))

        self._call(ask, lambda: answer.set_result(0), may_block=self._may_block_at_contains)
        return await asyncio.wrap_future(answer)

    def fetch(self, keys: Sequence[ChunkKey]) -> Fetch:
        """Start to get chunks."""
        fetch = Fetch(keys)
        nothing: list[MemoryObj | None] = [None] * len(keys)

        def answered(future: Future[list[MemoryObj | None]]) -> None:
            fetch.deliver(self._guard.objects(self.backend, len(keys), future.result))

        def ask() -> None:
            start = partial(self.backend.batched_get_non_blocking, keys)
            self._listen("get", start, answered, lambda: fetch.deliver(nothing))

        self._call(ask, lambda: fetch.deliver(nothing), may_block=self._may_block_at_get)
        return fetch

    def _listen(
        self,
        operation: str,
        start: Callable[[], Future[T]],
        answered: Callable[[Future[T]], None],
        failed: Callable[[], None],
    ) -> None:
        """Have a question asked, and its answer passed on."""
        pending = self._guard.call(self.backend, operation, start, None)
        if pending is None:
            failed()
        else:
            pending.add_done_callback(answered)

    def _call(
        self, ask: Callable[[], None], refused: Callable[[], None], *, may_block: bool
    ) -> None:
        if not may_block:
            ask()
            return

        def ended(done: Future[None]) -> None:
            if done.cancelled():
                refused()

        self._threads.submit(ask).add_done_callback(ended)


class PrefetchBudget:
    """A number of chunks to share out."""

    def __init__(self, num_chunks: int) -> None:
        """All of it is free.

        Args:
            num_chunks: at least 1.

        Raises:
            ValueError: it is less.
        """
        if num_chunks < 1:
            raise ValueError(f"prefetches need room for a chunk, got {num_chunks}")
        self.num_chunks = num_chunks
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, wanted: int) -> int:
        """Room for ``wanted`` chunks, or for all that there ever can be, once it is free.

        Returns:
            How many; the caller gives them back.
        """
        count = min(wanted, self.num_chunks)
        if self._waiting or self.used + count > self.num_chunks:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (count, turn)
            self._waiting.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                elif not turn.cancelled():
                    self.used -= count  # its turn came as it was given up
                self._let_in()
                raise
        else:
            self.used += count
        return count

    def give_back(self, count: int) -> None:
        """``count`` chunks are not held any more."""
        self.used -= count
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.num_chunks:
            count, turn = self._waiting.popleft()
            if not turn.done():  # else it was given up, and its task has not run since
                self.used += count
                turn.set_result(None)


@dataclass(frozen=True, slots=True)
class _Window:
    """Chunks that were asked for, and what others wait for who want them, too."""

    fetch: Fetch
    over: asyncio.Event


@dataclass(slots=True)
class PrefetchContext:
    """What all travels share.

    Attributes:
        first: the tier in memory.
        callers: the slow tiers by name.
        guard: calls ``first``.
        transfer: puts what arrives into ``first``.
        cost: says from which tiers loading pays, and learns how long it takes.
        room: how many chunks may be held.
        window_chunks: chunks asked for at once.
        windows_ahead: windows that one travel has under way.
        travelling: chunks that somebody is bringing, and when that is over. Of the I/O thread.
    """

    first: AllocatorBackendInterface
    callers: Mapping[str, TierCaller]
    guard: BackendGuard
    transfer: Transfer
    cost: LoadCostModel
    room: PrefetchBudget
    window_chunks: int
    windows_ahead: int
    travelling: dict[ChunkKey, asyncio.Event] = field(default_factory=dict)


class PrefetchTask:
    """One prompt's way into memory.

    Attributes:
        runs: which tier the chunks that are pinned came from, without gaps.
        room_taken: chunks of the room that it holds.
    """

    def __init__(
        self,
        keys: Sequence[ChunkKey],
        tiers: Sequence[StorageBackendInterface],
        roads: PrefetchContext,
        open_lease: Callable[[], Lease],
    ) -> None:
        """Nothing is held yet.

        Args:
            keys: the prompt's chunks in order.
            tiers: which may be asked, in order.
            roads: what all travels share.
            open_lease: called once, when something is about to be held.
        """
        self.runs: list[LocatedRun] = []
        self.room_taken = 0
        self._keys = keys
        self._tiers = tiers
        self._roads = roads
        self._open_lease = open_lease
        self._lease: Lease | None = None
        self._num_clears = roads.transfer.num_clears
        self._waited_for: set[ChunkKey] = set()
        self._unmeasured: tuple[str, float] | None = None  # a tier that brought nothing, and since

    @property
    def position(self) -> int:
        """Chunks that are pinned, from the first on."""
        return self.runs[-1].end if self.runs else 0

    @property
    def lease(self) -> Lease:
        """The owner of everything that is held."""
        if self._lease is None:
            self._lease = self._open_lease()
        return self._lease

    def take_lease(self) -> Lease | None:
        """Hand the lease over; None if nothing was ever held."""
        return self._lease

    async def go(self) -> None:
        """Bring in as much of the prefix as the tiers have and there is room for."""
        located = await self._locate(0)
        wanted = located[-1].end if located else 0
        if not wanted:
            return
        self.room_taken = await self._roads.room.take(wanted)
        limit = min(wanted, self.room_taken)
        asked_again_at = -1
        while self.position < limit:
            if self.pin_present(limit):
                continue
            run = self._run_at(located)
            if run is None and asked_again_at != self.position:
                asked_again_at = self.position
                located = await self._locate(self.position)
                continue
            if run is None or not await self._bring(run.location, min(run.end, limit)):
                return

    def pin_present(self, limit: int) -> bool:
        """Pin the run of chunks that are in memory at the position; False if there is none."""
        first = self._roads.first
        if first not in self._tiers:
            return False
        rest = self._keys[self.position : limit]
        count = self._roads.guard.count(
            first, len(rest), partial(first.batched_contains, rest, pin=self.lease)
        )
        self._note_run(first.name, count)
        return count > 0

    def _note_run(self, location: str, count: int) -> None:
        start = self.position
        if count and self.runs and self.runs[-1].location == location:
            self.runs[-1] = LocatedRun(location, self.runs[-1].start, start + count)
        elif count:
            self.runs.append(LocatedRun(location, start, start + count))

    def note_late(self) -> None:
        """The deadline has passed: a tier that brought nothing until then is as slow as that."""
        if self._unmeasured is not None:
            location, started = self._unmeasured
            self._roads.cost.note_load(location, 0, time.perf_counter() - started)

    async def _locate(self, start: int) -> list[LocatedRun]:
        """Which tier says that it holds which chunk from ``start`` on; see ``locate_prefix``."""
        runs: list[LocatedRun] = []
        position = start
        while position < len(self._keys):
            for backend in self._tiers:
                if runs and runs[-1].location == backend.name:
                    continue  # its run has just ended here
                length = await self._count(backend, self._keys[position:])
                if length:
                    runs.append(LocatedRun(backend.name, position, position + length))
                    position += length
                    break
            else:
                break
        return runs

    async def _count(self, backend: StorageBackendInterface, keys: Sequence[ChunkKey]) -> int:
        caller = self._roads.callers.get(backend.name)
        if caller is not None:
            if not self._roads.cost.admits(backend.name, len(keys), prompt=keys[-1]):
                return 0
            started = time.perf_counter()
            found = await caller.count(keys)
            if not found:
                self._roads.cost.note_load(backend.name, 0, time.perf_counter() - started)
            return found
        run = partial(backend.batched_contains, keys)
        return self._roads.guard.count(backend, len(keys), run)

    def _run_at(self, located: Sequence[LocatedRun]) -> LocatedRun | None:
        """The slow tier's run that covers the position."""
        for run in located:
            if run.start <= self.position < run.end and run.location in self._roads.callers:
                return run
        return None

    async def _bring(self, location: str, end: int) -> bool:
        """Fetch the chunks from the position to ``end`` out of one tier, a few ahead.

        Returns:
            False if the prefix ends before ``end``.
        """
        caller, limit = self._roads.callers[location], self._roads.windows_ahead
        asked = first = self.position
        ahead: deque[_Window] = deque()
        started, is_alone = time.perf_counter(), True
        try:
            while self.position < end:
                while len(ahead) < limit and (upto := self._window(asked, end)) > asked:
                    ahead.append(self._depart(caller, self._keys[asked:upto]))
                    asked = upto
                if not ahead:
                    is_alone = False  # the time of others is no measure
                    await self._wait_for_others()
                    return True
                objs = await ahead[0].fetch.take()
                if not self._arrive(caller.backend, ahead.popleft(), objs):
                    return False
            return True
        finally:
            for window in ahead:
                window.fetch.abandon()
                self._end_of(window)
            brought = self.position - first
            self._unmeasured = (location, started) if is_alone and not brought else None
            if is_alone and brought:
                self._roads.cost.note_load(location, brought, time.perf_counter() - started)

    def _window(self, start: int, end: int) -> int:
        """Where the next window ends: before a chunk that somebody else is bringing."""
        upto = min(end, start + self._roads.window_chunks)
        for index in range(start, upto):
            key = self._keys[index]
            if key in self._roads.travelling and key not in self._waited_for:
                return index
        return upto

    async def _wait_for_others(self) -> None:
        """Wait, once, until the chunk at the position is not being brought any more."""
        key = self._keys[self.position]
        self._waited_for.add(key)
        await self._roads.travelling[key].wait()

    def _depart(self, caller: TierCaller, keys: Sequence[ChunkKey]) -> _Window:
        over = asyncio.Event()
        for key in keys:
            self._roads.travelling.setdefault(key, over)
        return _Window(caller.fetch(keys), over)

    def _end_of(self, window: _Window) -> None:
        """Nobody has to wait for these chunks any more."""
        travelling = self._roads.travelling
        for key in window.fetch.keys:
            if travelling.get(key) is window.over:
                del travelling[key]
        window.over.set()

    def _arrive(
        self, backend: StorageBackendInterface, window: _Window, objs: list[MemoryObj | None]
    ) -> bool:
        """Put what has arrived into memory and pin it; False if the prefix ends within it."""
        roads = self._roads
        keys = window.fetch.keys
        try:
            with References(objs):
                if not roads.transfer.write_back(backend, keys, objs, since=self._num_clears):
                    return False
                first_gap = objs.index(None) if None in objs else len(objs)
                pin = partial(roads.first.batched_contains, keys[:first_gap], pin=self.lease)
                count = roads.guard.count(roads.first, first_gap, pin)
                self._note_run(backend.name, count)
                return count == len(keys)
        finally:
            self._end_of(window)


_log = logging.getLogger(__name__)

#: How long closing waits for the I/O thread and for calls of tiers that have begun.
_CLOSE_TIMEOUT_S = 5.0
#: How long a claim waits beyond the deadline of its prefetch, which answers by then.
_CLAIM_MARGIN_S = 1.0
LOADING = EventType.LOADING
#: Outcomes after which there is something to answer with.
_ANSWERED = ("done", "deadline")


@dataclass(frozen=True, slots=True)
class PrefetchOptions:
    """What prefetches are told.

    Attributes:
        max_chunks: chunks that all lookups together may hold which were answered late.
        timeout_s: a lookup is answered by then with what has arrived.
        window_chunks: chunks that one lookup asks of a tier at once; what has not arrived of them
            by the deadline is not counted.
        windows_ahead: how often it asks before the first answer.
        max_lookups: lookups under way; further ones find what is in memory.
        calls_per_tier: calls of a tier without futures at once.
        stall_timeout_s: with all of them running for longer, the tier is not asked.
    """

    max_chunks: int = 64
    timeout_s: float = 10.0
    window_chunks: int = 1
    windows_ahead: int = 8
    max_lookups: int = 4096
    calls_per_tier: int = 4
    stall_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The answer to a lookup.

    Attributes:
        num_tokens: tokens of the prefix that is in memory now.
        runs: which tiers its chunks came from, without gaps.
    """

    num_tokens: int
    runs: tuple[LocatedRun, ...]


_NOTHING = Prefetched(0, ())


@dataclass(frozen=True, slots=True)
class _Job:
    """One lookup."""

    lookup_id: str
    keys: Sequence[ChunkKey]
    cum_chunk_lengths: Sequence[int]
    tiers: Sequence[StorageBackendInterface]
    pin: bool
    future: Future[Prefetched]

    def answer(self, runs: Sequence[LocatedRun]) -> Prefetched:
        num_chunks = runs[-1].end if runs else 0
        return Prefetched(self.cum_chunk_lengths[num_chunks], tuple(runs))


class Prefetcher:
    """Answers lookups at once where everything is in memory, and else when it is.

    Attributes:
        events: what is under way or held, by lookup.
    """

    def __init__(
        self,
        tiers: Tiers,
        first: AllocatorBackendInterface,
        *,
        guard: BackendGuard,
        transfer: Transfer,
        leases: LeaseTable,
        metrics: Metrics,
        cost: LoadCostModel,
        options: PrefetchOptions,
    ) -> None:
        """No thread yet.

        Args:
            tiers: where to look.
            first: the tier in memory.
            guard: calls the tiers.
            transfer: puts what arrives into ``first``.
            leases: where answered lookups keep what they found.
            metrics: where outcomes are counted.
            cost: says from which tiers loading pays.
            options: bounds.
        """
        self.events = EventManager()
        self._tiers = tiers
        self._first = first
        self._guard = guard
        self._leases = leases
        self._metrics = metrics
        self._options = options
        self._runtime = IORuntime(max_tasks=options.max_lookups, on_error=self._note_error)
        self._threads = {
            backend.name: CallThreads(
                backend.name,
                limit=options.calls_per_tier,
                stall_timeout_s=options.stall_timeout_s,
            )
            for backend in tiers.backends.values()
            if backend is not first
        }
        callers = {
            name: TierCaller(tiers.backends[name], guard, threads)
            for name, threads in self._threads.items()
        }
        room = PrefetchBudget(options.max_chunks)
        self._roads = PrefetchContext(
            first=first,
            callers=callers,
            guard=guard,
            transfer=transfer,
            cost=cost,
            room=room,
            window_chunks=options.window_chunks,
            windows_ahead=options.windows_ahead,
        )
        self._running: dict[Future[Prefetched], asyncio.Task[None]] = {}  # of the I/O thread

    def lookup(
        self,
        lookup_id: str,
        keys: Sequence[ChunkKey],
        cum_chunk_lengths: Sequence[int],
        search_range: Collection[str] | None,
        *,
        pin: bool,
    ) -> Future[Prefetched]:
        """See :meth:`kvkeep.storage.manager.StorageManager.async_lookup_and_prefetch`."""
        tiers = self._tiers.readable(search_range)
        future: Future[Prefetched] = Future()
        future.set_running_or_notify_cancel()
        job = _Job(lookup_id, keys, cum_chunk_lengths, tiers, pin, future)
        self.stop(lookup_id)
        must_travel = any(backend.name in self._threads for backend in tiers)
        if self._answer_from_memory(job, is_all=not must_travel):
            return future
        self.events.add_event(LOADING, lookup_id, future)
        if not self._runtime.start(partial(self._run, job)):
            self.events.pop_event(LOADING, lookup_id, future=future)
            self._metrics.prefetched("refused")
            self._answer_from_memory(job, is_all=True)
        return future

    def stop(self, lookup_id: str) -> bool:
        """Give up a lookup that is under way; it is answered with nothing. False if there is none.

        What it holds is given back in the I/O thread, and what arrives later as it does.
        """
        future = self.events.pop_event(LOADING, lookup_id)
        if future is None or future.done():
            return False
        return self._runtime.call_soon(partial(self._cancel, future))

    def claim(self, lookup_id: str) -> Lease | None:
        """The lease of an answered lookup, which the caller must release; None if it has none.

        A lookup that is still under way is waited for, at most until its deadline.

        Raises:
            RuntimeError: in the I/O thread, which would wait for itself.
        """
        future = self.events.get_event(LOADING, lookup_id)
        if future is not None and not future.done():
            self._runtime.refuse_inside("claiming a lease")
            try:
                future.result(self._options.timeout_s + _CLAIM_MARGIN_S)
            except TimeoutError:
                self._metrics.failure(self._first.name, "claim", "timeout")
                self.stop(lookup_id)
        return self._leases.claim(lookup_id)

    @property
    def num_lookups(self) -> int:
        """Lookups that are under way."""
        return self._runtime.num_tasks

    @property
    def num_chunks_held(self) -> int:
        """Chunks of the room for prefetches that are taken."""
        return self._roads.room.used

    def stop_all(self) -> None:
        """Give up every lookup that is under way."""
        for lookup_id in self.events.ids(LOADING):
            self.stop(lookup_id)

    def close(self) -> None:
        """Give up all lookups and end the threads; later lookups find what is in memory."""
        self._runtime.close(_CLOSE_TIMEOUT_S)
        for threads in self._threads.values():
            threads.close(_CLOSE_TIMEOUT_S)

    def _answer_from_memory(self, job: _Job, *, is_all: bool) -> bool:
        """Answer at once with what is in memory.

        Args:
            job: the lookup.
            is_all: also if that is not the whole prompt; else this declines, and nothing is held.
        """
        lease = self._leases.open(job.lookup_id)
        pin = lease if job.pin else None
        count = 0
        if job.keys and self._first in job.tiers:
            ask = partial(self._first.batched_contains, job.keys, pin=pin)
            count = self._guard.count(self._first, len(job.keys), ask)
        if count < len(job.keys) and not is_all:
            lease.release()
            return False
        if count and job.pin:
            self._leases.keep(job.lookup_id, lease)
        else:
            lease.release()
            self._leases.release(job.lookup_id)
        runs = [LocatedRun(self._first.name, 0, count)] if count else []
        job.future.set_result(job.answer(runs))
        return True

    async def _run(self, job: _Job) -> None:
        """The task of one lookup. It answers, whatever happens."""
        travel = PrefetchTask(
            job.keys, job.tiers, self._roads, partial(self._leases.open, job.lookup_id)
        )
        outcome = "failed"
        try:
            if self._is_wanted(job):
                self._running[job.future] = _current_task()
                async with asyncio.timeout(self._options.timeout_s):
                    await travel.go()
            outcome = "done"
        except TimeoutError:
            outcome = "deadline"
            travel.note_late()
            travel.pin_present(len(job.keys))
        except asyncio.CancelledError:
            outcome = "stopped"
        except Exception as error:  # noqa: BLE001  the top of this task
            self._note_error(error)
        finally:
            self._running.pop(job.future, None)
            self._settle(job, travel, outcome)

    def _settle(self, job: _Job, travel: PrefetchTask, outcome: str) -> None:
        """Keep what was found for whoever asked, or give it back; then answer."""
        lease = travel.take_lease()
        answer = job.answer(travel.runs) if outcome in _ANSWERED else _NOTHING
        if (
            lease is not None
            and answer.num_tokens
            and job.pin
            and self.events.update_event_status(
                LOADING, job.lookup_id, EventStatus.DONE, future=job.future
            )
        ):
            lease.when_released = partial(self._release, job, travel.room_taken)
            self._leases.keep(job.lookup_id, lease)
            is_wanted = self._is_wanted(job)
            if not is_wanted:  # given up since it was kept
                self._leases.drop(job.lookup_id, lease)
        else:
            is_wanted = self.events.pop_event(LOADING, job.lookup_id, future=job.future) is not None
            if is_wanted:
                self._leases.release(job.lookup_id)  # of an earlier lookup with this id
            if lease is not None:
                lease.release()
            self._roads.room.give_back(travel.room_taken)
        self._metrics.prefetched(outcome if is_wanted else "stopped")
        job.future.set_result(answer if is_wanted else _NOTHING)

    def _release(self, job: _Job, num_chunks: int) -> None:
        """The lease of an answered lookup has ended: so has its event, and its room is free."""
        self.events.pop_event(LOADING, job.lookup_id, future=job.future)
        self._runtime.call_soon(partial(self._roads.room.give_back, num_chunks))

    def _is_wanted(self, job: _Job) -> bool:
        """The lookup was not given up."""
        return self.events.get_event(LOADING, job.lookup_id) is job.future

    def _cancel(self, future: Future[Prefetched]) -> None:
        task = self._running.get(future)
        if task is not None:
            task.cancel()

    def _note_error(self, error: BaseException) -> None:
        self._metrics.failure(self._first.name, "prefetch", type(error).__name__)
        _log.error("a prefetch failed", exc_info=error)


def _current_task() -> asyncio.Task[None]:
    task: asyncio.Task[None] | None = asyncio.current_task()
    if task is None:
        raise RuntimeError("not in a task")
    return task
