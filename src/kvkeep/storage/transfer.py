"""Transfer: moves chunks into and out of one tier, whatever that tier does.

Copies only where a tier's memory is another's; writes what a lower tier had back into the first.
Callable from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from kvkeep.backends.base import AllocatorBackendInterface, PutOutcome, StorageBackendInterface
from kvkeep.hashing import ChunkKey
from kvkeep.memory.base import MemoryObj, References
from kvkeep.metrics import Metrics
from kvkeep.prefix import LocatedRun
from kvkeep.storage.cost import LoadCostModel
from kvkeep.storage.tiers import BackendGuard, Tiers


def copy_objects(backend: AllocatorBackendInterface, objs: Sequence[MemoryObj]) -> list[MemoryObj]:
    """Copies in the memory of ``backend``, as many from the first on as fit, without waiting."""
    with References() as copies:
        for obj in objs:
            meta = obj.metadata
            copy = backend.allocate(meta.shape, meta.dtype, meta.fmt, busy_loop=False)
            if copy is None:
                break
            copies.adopt([copy])
            np.copyto(copy.array, obj.array)
        return copies.detach()


def allocate_most(
    wanted: int, allocate: Callable[[int], list[MemoryObj] | None]
) -> list[MemoryObj]:
    """As many of ``wanted`` objects as ``allocate`` gives.

    All are asked for at once. When a request fails, half as many are asked for, so that the most
    that fits is found with about log2(wanted) failures, which evict nothing.

    Args:
        wanted: how many.
        allocate: that many objects, or None if there is no room for all of them.
    """
    with References() as held:
        step = wanted
        while step and len(held.objects) < wanted:
            step = min(step, wanted - len(held.objects))
            objs = allocate(step)
            if objs is None:
                step //= 2
            else:
                held.adopt(objs)
        return held.detach()


class _Gathered:
    """The answers of several tiers as one future. Filled from any thread."""

    def __init__(self, count: int, num_parts: int) -> None:
        """All misses so far; answered at once without parts."""
        self.future: Future[list[MemoryObj | None]] = Future()
        self.future.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._objs: list[MemoryObj | None] = [None] * count  # guarded by _lock
        self._missing = num_parts  # guarded by _lock
        if not num_parts:
            self.future.set_result(self._objs)

    def add(self, start: int, objs: Sequence[MemoryObj | None]) -> None:
        """One part has come; the last one completes the future."""
        with self._lock:
            self._objs[start : start + len(objs)] = objs
            self._missing -= 1
            is_complete = not self._missing
        if is_complete:
            self.future.set_result(self._objs)


class Transfer:
    """Puts into and gets from single tiers; faults become counted losses and misses."""

    def __init__(
        self,
        tiers: Tiers,
        guard: BackendGuard,
        metrics: Metrics,
        cost: LoadCostModel,
    ) -> None:
        """Move chunks between tiers.

        Args:
            tiers: the first one is where chunks travel to; write-back goes to it.
            guard: calls the backends.
            metrics: where losses are counted.
            cost: learns how long loads take.
        """
        self._tiers = tiers
        self._first = tiers.first
        self._guard = guard
        self._metrics = metrics
        self._cost = cost

    @property
    def num_clears(self) -> int:
        """How often tiers were cleared; see :meth:`write_back`."""
        return self._tiers.num_clears

    def put(
        self,
        backend: StorageBackendInterface,
        keys: Sequence[ChunkKey],
        objs: Sequence[MemoryObj],
        source: AllocatorBackendInterface,
    ) -> list[PutOutcome] | None:
        """Put into one tier; the references stay the caller's.

        Args:
            backend: the tier.
            keys: the chunks.
            objs: their bytes, position by position.
            source: the backend in whose memory ``objs`` are.

        Returns:
            What became of each; None if the tier failed.
        """
        run = partial(_put_into, backend, keys, objs, source)
        outcomes = self._guard.outcomes(backend, len(keys), run)
        for loss in (PutOutcome.NO_ROOM, PutOutcome.DROPPED):
            if outcomes is not None and loss in outcomes:
                self._metrics.dropped(backend.name, loss.value, outcomes.count(loss))
        return outcomes

    def get(
        self, backend: StorageBackendInterface, keys: Sequence[ChunkKey]
    ) -> list[MemoryObj | None]:
        """Get from one tier, position by position; what it had is in the first tier then too."""
        run, started = partial(backend.batched_get_blocking, keys), time.perf_counter()
        since = self.num_clears
        objs = self._guard.objects(backend, len(keys), run)
        self._note_load(backend, objs, started)
        self.write_back(backend, keys, objs, since=since)
        return objs

    def start_gets(
        self, keys: Sequence[ChunkKey], parts: Sequence[tuple[StorageBackendInterface, LocatedRun]]
    ) -> Future[list[MemoryObj | None]]:
        """Get from several tiers at once, as one future that cannot be cancelled and never raises.

        Chunks that are in memory already are held before room is made for those of other tiers.

        Args:
            keys: the chunks.
            parts: which tier to ask for which of them; what no part covers is a miss.
        """
        gathered, num_clears = _Gathered(len(keys), len(parts)), self.num_clears
        for backend, run in sorted(parts, key=lambda part: part[0] is not self._first):
            part = keys[run.start : run.end]
            start = partial(backend.batched_get_non_blocking, part)
            pending = self._guard.call(backend, "get", start, None) if part else None
            if pending is None:
                gathered.add(run.start, [])
            else:
                place = partial(gathered.add, run.start)
                since = (time.perf_counter(), num_clears)
                finish = partial(self._finish, backend, part, place, since)
                pending.add_done_callback(finish)
        return gathered.future

    def _finish(
        self,
        backend: StorageBackendInterface,
        keys: Sequence[ChunkKey],
        place: Callable[[Sequence[MemoryObj | None]], None],
        since: tuple[float, int],
        answered: Future[list[MemoryObj | None]],
    ) -> None:
        """One tier has answered, which was asked at a time, after so many clears."""
        started, num_clears = since
        objs = self._guard.objects(backend, len(keys), answered.result)
        self._note_load(backend, objs, started)
        self.write_back(backend, keys, objs, since=num_clears)
        place(objs)

    def _note_load(
        self, backend: StorageBackendInterface, objs: Sequence[MemoryObj | None], started: float
    ) -> None:
        if backend is not self._first:
            count = sum(obj is not None for obj in objs)
            self._cost.note_load(backend.name, count, time.perf_counter() - started)

    def write_back(
        self,
        backend: StorageBackendInterface,
        keys: Sequence[ChunkKey],
        objs: Sequence[MemoryObj | None],
        *,
        since: int,
    ) -> bool:
        """Put every chunk that arrived from a lower tier into the first one.

        Args:
            backend: the lower tier.
            keys: the chunks.
            objs: what arrived, position by position.
            since: ``num_clears`` when they were asked for.

        Returns:
            False if tiers were cleared since: what was asked for before may be wrong by now.
        """
        with self._tiers.clear_lock:
            if self._tiers.num_clears != since:
                return False
            if backend is self._first or self._first not in self._tiers.active():
                return True
            if self._tiers.frozen:  # since the chunks were asked for
                return True
            arrived = [(key, obj) for key, obj in zip(keys, objs, strict=True) if obj is not None]
            if arrived:
                source = backend.get_allocator_backend()
                names = [key for key, _ in arrived]
                self.put(self._first, names, [obj for _, obj in arrived], source)
            return True


def _put_into(
    backend: StorageBackendInterface,
    keys: Sequence[ChunkKey],
    objs: Sequence[MemoryObj],
    source: AllocatorBackendInterface,
) -> list[PutOutcome]:
    """Put, over a copy if the tier's memory is not where ``objs`` are."""
    target = backend.get_allocator_backend()
    if target is source:
        return backend.batched_submit_put_task(keys, objs)
    with References(copy_objects(target, objs)) as copies:
        num = len(copies.objects)
        outcomes = backend.batched_submit_put_task(keys[:num], copies.objects)
    return [*outcomes, *[PutOutcome.NO_ROOM] * (len(keys) - num)]
