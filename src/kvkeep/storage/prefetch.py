"""Prefetcher: lookups whose chunks travel from slow tiers into memory before they are answered.

A lookup is answered exactly once, whatever happens to it: it ends, its deadline passes (then with
the part that has arrived), it is given up, something raises, or everything is closed. What is
answered for is in memory, verified, and held by the lookup's lease; everything else that came is
given back at once. Callable from any thread; nothing here waits but ``claim`` and ``close``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvkeep.backends.base import AllocatorBackendInterface, StorageBackendInterface
from kvkeep.backends.lease import Lease
from kvkeep.keys import ChunkKey
from kvkeep.metrics import Metrics
from kvkeep.prefix import LocatedRun
from kvkeep.storage.calls import CallThreads
from kvkeep.storage.cost import CostRule
from kvkeep.storage.events import EventManager, EventStatus, EventType
from kvkeep.storage.fetch import TierCaller
from kvkeep.storage.guard import BackendGuard
from kvkeep.storage.leases import LeaseTable
from kvkeep.storage.prefetch_room import PrefetchRoom
from kvkeep.storage.runtime import IORuntime
from kvkeep.storage.tiers import Tiers
from kvkeep.storage.transfer import Transfer
from kvkeep.storage.travel import Roads, Travel

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
        cost: CostRule,
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
        room = PrefetchRoom(options.max_chunks)
        self._roads = Roads(
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
        travel = Travel(job.keys, job.tiers, self._roads, partial(self._leases.open, job.lookup_id))
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

    def _settle(self, job: _Job, travel: Travel, outcome: str) -> None:
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
