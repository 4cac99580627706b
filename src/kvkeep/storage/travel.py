"""Travel: brings the chunks of one prompt into memory, from the first on, and pins them.

A prefix may lie in several tiers, and somebody else may be bringing parts of it already::

    chunk      |  0  |  1  |  2  |  3  |  4  |  5  |
    where      | L1  | L1  | disk| disk| L1  |remote|
    position         ->          pinned up to here; what follows is asked for, a few chunks ahead

Everything here runs in the I/O thread. What a Travel holds belongs to its lease, and every chunk
that the lease holds is one of a prefix without gaps, whenever it is stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvkeep.backends.base import AllocatorBackendInterface, StorageBackendInterface
from kvkeep.backends.lease import Lease
from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.ownership import References
from kvkeep.prefix import LocatedRun
from kvkeep.storage.cost import CostRule
from kvkeep.storage.fetch import Fetch, TierCaller
from kvkeep.storage.guard import BackendGuard
from kvkeep.storage.prefetch_room import PrefetchRoom
from kvkeep.storage.transfer import Transfer


@dataclass(frozen=True, slots=True)
class _Window:
    """Chunks that were asked for, and what others wait for who want them, too."""

    fetch: Fetch
    over: asyncio.Event


@dataclass(slots=True)
class Roads:
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
    cost: CostRule
    room: PrefetchRoom
    window_chunks: int
    windows_ahead: int
    travelling: dict[ChunkKey, asyncio.Event] = field(default_factory=dict)


class Travel:
    """One prompt's way into memory.

    Attributes:
        runs: which tier the chunks that are pinned came from, without gaps.
        room_taken: chunks of the room that it holds.
    """

    def __init__(
        self,
        keys: Sequence[ChunkKey],
        tiers: Sequence[StorageBackendInterface],
        roads: Roads,
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
