"""StorageManager: the tiers as one hierarchy.

Callable from any thread. The order of the tiers is their priority. A tier that fails or is bypassed
is left out and the others go on; its faults are counted and never raised, the caller's are raised.

PoolAccess: the storage manager's part that hands out memory of the pool.

Callable from any thread. Faults of the allocator backend are counted and count as no room.

TierControl: the storage manager's part that says which tiers take part. For any thread.

PrefixSearch: which tier holds which chunk of a prefix. Callable from any thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import NoReturn

import torch

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    BackendHealth,
    Lease,
    PutOutcome,
    StorageBackendInterface,
)
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.hashing import ChunkKey, LayerKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj, MemoryReport, References
from kvkeep.metrics import Metrics
from kvkeep.prefix import LocatedRun, locate_prefix
from kvkeep.storage.cost import CostOptions, LoadCostModel
from kvkeep.storage.leases import LeaseTable
from kvkeep.storage.prefetch import Prefetched, Prefetcher, PrefetchOptions
from kvkeep.storage.tiers import BackendGuard, Clearing, Tiers
from kvkeep.storage.transfer import Transfer, allocate_most, copy_objects


class PoolAccess:
    """Allocates from the allocator backend.

    Attributes:
        allocator_backend: whose memory all chunks travel in.
    """

    def __init__(self, allocator_backend: AllocatorBackendInterface, guard: BackendGuard) -> None:
        """Hand out memory of ``allocator_backend``, called through ``guard``."""
        self.allocator_backend = allocator_backend
        self._guard = guard

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """One object; see :meth:`batched_allocate`."""
        objs = self.batched_allocate(shape, dtype, 1, fmt, eviction=eviction, busy_loop=busy_loop)
        return objs[0] if objs else None

    def batched_allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        eviction: bool = True,
        busy_loop: bool = True,
        protect: Collection[ChunkKey] = (),
    ) -> list[MemoryObj] | None:
        """``batch_size`` objects of one shape, all or none.

        See :meth:`kvkeep.backends.base.AllocatorBackendInterface.batched_allocate`. A failure of
        the allocator backend is no room.

        Raises:
            ValueError: the shape has no size.
        """
        if batch_size < 0 or not shape or min(shape) < 1:
            raise ValueError(f"cannot allocate {batch_size} objects of shape {tuple(shape)}")
        run = partial(self.allocator_backend.batched_allocate, shape, dtype, batch_size, fmt)
        run = partial(run, eviction=eviction, busy_loop=busy_loop, protect=protect)
        return self._guard.call(self.allocator_backend, "allocate", run, None)

    def allocate_prefix(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        wanted: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        protect: Collection[ChunkKey] = (),
    ) -> list[MemoryObj]:
        """As many of ``wanted`` objects as there is room for, without waiting.

        All are asked for at once, and only if that fails for fewer. As little as needed is evicted.

        Args:
            shape: of one object.
            dtype: element type.
            wanted: how many.
            fmt: arrangement.
            protect: chunks of the same prompt, so that a suffix never evicts its own prefix.
        """
        return allocate_most(
            wanted,
            lambda count: self.batched_allocate(
                shape, dtype, count, fmt, busy_loop=False, protect=protect
            ),
        )

    def allocate_and_copy_objects(
        self, backend: AllocatorBackendInterface, objs: Sequence[MemoryObj]
    ) -> list[MemoryObj]:
        """Copies of ``objs`` in the memory of ``backend``, as many from the first on as fit."""
        return copy_objects(backend, objs)

    def memcheck(self) -> MemoryReport:
        """Prove the allocator backend's pool; raises OwnershipError if it is not sound."""
        return self.allocator_backend.memcheck()


class PrefixSearch:
    """Asks the readable tiers, in order, for runs of chunks."""

    def __init__(self, tiers: Tiers, guard: BackendGuard, cost: LoadCostModel) -> None:
        """Search ``tiers``; a tier that fails has nothing, and ``cost`` says which are worth it."""
        self._tiers = tiers
        self._guard = guard
        self._cost = cost

    def locate(
        self,
        keys: Sequence[ChunkKey],
        search_range: Collection[str] | None,
        pin: Lease | None,
        *,
        to_load: bool,
    ) -> list[LocatedRun]:
        """Runs without gaps; see :meth:`kvkeep.storage.manager.StorageManager.get_block_mapping`.

        Args:
            keys: the chunks.
            search_range: names of the tiers to ask; all if None.
            pin: the owner of pins.
            to_load: ask a tier below the first one only where loading from it pays.

        Raises:
            ValueError: a tier in ``search_range`` does not exist.
        """
        tiers = self._tiers.readable(search_range)
        askers = [
            (
                backend.name,
                self._weighed(backend, keys, pin)
                if to_load and backend is not self._tiers.first
                else self._asker(backend, keys, pin),
            )
            for backend in tiers
        ]
        return locate_prefix(len(keys), askers)

    def locate_known(self, keys: Sequence[ChunkKey]) -> list[LocatedRun]:
        """Runs as :meth:`locate` has them, of what the tiers know without asking a slow medium.

        What only a tier has that lookups leave out does not count: it has to come into memory.
        """

        def asker(backend: StorageBackendInterface) -> Callable[[int], int]:
            return lambda start: self._guard.count(
                backend, len(keys) - start, partial(backend.known_run, keys[start:])
            )

        tiers = [
            backend
            for backend in self._tiers.readable()
            if backend is self._tiers.first or not self._cost.is_slow(backend.name, len(keys))
        ]
        return locate_prefix(len(keys), [(backend.name, asker(backend)) for backend in tiers])

    def _asker(
        self, backend: StorageBackendInterface, keys: Sequence[ChunkKey], pin: Lease | None
    ) -> Callable[[int], int]:
        def ask(start: int) -> int:
            rest = keys[start:] if start else keys
            since = self._tiers.num_clears
            found = self._guard.count(
                backend, len(rest), partial(backend.batched_contains, rest, pin=pin)
            )
            if pin is not None and self._tiers.num_clears != since:
                self._forget(backend, rest[:found])
            return found

        return ask

    def _forget(self, backend: StorageBackendInterface, keys: Sequence[ChunkKey]) -> None:
        """Tiers were cleared while a lower one pinned these: what it brought in must not stay.

        The lookup began before that, and its lease holds what it found.
        """
        first = self._tiers.first
        if backend is not first:
            self._guard.call(first, "remove", partial(first.batched_remove, keys), 0)

    def _weighed(
        self, backend: StorageBackendInterface, keys: Sequence[ChunkKey], pin: Lease | None
    ) -> Callable[[int], int]:
        """The same where a load follows, or is part of the answer as it is with ``pin``."""
        plain = self._asker(backend, keys, pin)

        def ask(start: int) -> int:
            if not self._cost.admits(backend.name, len(keys) - start, prompt=keys[-1]):
                return 0
            started = time.perf_counter()
            found = plain(start)
            if pin is not None or not found:
                self._cost.note_load(backend.name, found, time.perf_counter() - started)
            return found

        return ask


class TierControl:
    """Freezes, bypasses, asks after health, and holds background work back."""

    def __init__(self, tiers: Tiers, clearing: Clearing, guard: BackendGuard) -> None:
        """Control ``tiers``, which are called through ``guard``."""
        self._tiers = tiers
        self._clearing = clearing
        self._guard = guard

    def set_frozen(self, frozen: bool) -> None:
        """Frozen: nothing is put, and only the allocator's own tier is searched and read."""
        self._tiers.frozen = frozen

    def is_frozen(self) -> bool:
        """Whether it is frozen."""
        return self._tiers.frozen

    def set_bypassed(self, name: str, bypassed: bool) -> None:
        """Leave a tier out of everything, or take it back in; ValueError if there is none of it.

        Its pins on memory are still given back when their leases end.
        """
        self._tiers.set_bypassed(name, bypassed)

    @property
    def bypassed(self) -> frozenset[str]:
        """Names of the tiers that are left out."""
        return self._tiers.bypassed

    def backend_health(self, name: str) -> BackendHealth:
        """A tier's opinion of itself; one that raises is unhealthy. Takes as long as the tier does.

        Raises:
            ValueError: there is no such tier.
        """
        self._tiers.check_names([name])
        return self._clearing.health(name)

    def make_way(self) -> ExitStack:
        """Until what is returned is closed, tiers hold back what they store in the background.

        For the time in which the engine waits for a copy: both would share processor and memory.
        """
        with ExitStack() as held:
            for backend in self._tiers.active():
                held.enter_context(
                    self._guard.call(backend, "make_way", backend.make_way, nullcontext())
                )
            return held.pop_all()


class StorageManager(PoolAccess, TierControl):
    """Puts chunks into all tiers and gets them from the first that has them."""

    def __init__(
        self,
        backends: Sequence[StorageBackendInterface],
        *,
        allocator_backend: AllocatorBackendInterface,
        metrics: Metrics,
        lease_timeout_s: float = 300.0,
        prefetching: PrefetchOptions | None = None,
        cost: CostOptions | None = None,
    ) -> None:
        """Join tiers, and own them: :meth:`close` closes them.

        Args:
            backends: in order of priority, with different names.
            allocator_backend: hands out the memory; usually the first of ``backends``.
            metrics: where failures, drops and expired leases are counted.
            lease_timeout_s: seconds until a lease that nobody claims is taken back.
            prefetching: bounds of lookups that are answered later; None for the usual ones.
            cost: what a chunk is, to know which tiers pay; None asks all of them.

        Raises:
            ValueError: two backends have one name.
        """
        self._tiers = Tiers(backends, allocator_backend)
        self.storage_backends: OrderedDict[str, StorageBackendInterface] = self._tiers.backends
        self.leases = LeaseTable(
            timeout_s=lease_timeout_s,
            on_expired=lambda lease: metrics.lease_expired(),
            is_bypassed=self._tiers.is_bypassed,
        )
        self.metrics = metrics
        guard = BackendGuard(metrics)
        PoolAccess.__init__(self, allocator_backend, guard)
        TierControl.__init__(self, self._tiers, Clearing(self._tiers, guard), guard)
        self.cost = LoadCostModel(cost or CostOptions(enabled=False), metrics)
        self._search = PrefixSearch(self._tiers, self._guard, self.cost)
        self._transfer = Transfer(self._tiers, self._guard, metrics, self.cost)
        self._prefetcher = Prefetcher(
            self._tiers,
            allocator_backend,
            guard=self._guard,
            transfer=self._transfer,
            cost=self.cost,
            leases=self.leases,
            metrics=metrics,
            options=prefetching or PrefetchOptions(),
        )
        metrics.watch_prefetches(lambda: float(self._prefetcher.num_lookups))
        metrics.watch_leases(self.leases.__len__)
        for name in self.storage_backends:
            metrics.watch_bypass(name, partial(self._tiers.is_bypassed, name))
            self.cost.watch(name)
        if isinstance(allocator_backend, LocalCPUBackend) and not allocator_backend.before_evict:
            allocator_backend.before_evict = self.leases.reap

    def put(self, key: ChunkKey, obj: MemoryObj) -> NoReturn:
        """Raises RuntimeError: each single object would cost a lock and a walk over the tiers."""
        raise RuntimeError("put() takes no single objects; call batched_put([key], [obj])")

    def batched_put(
        self, keys: Sequence[ChunkKey], objs: Sequence[MemoryObj], *, location: str | None = None
    ) -> dict[str, list[PutOutcome]]:
        """Hand chunks to every tier. Consumes the caller's references, whatever happens.

        Args:
            keys: the chunks.
            objs: their bytes, position by position, in the allocator backend's memory.
            location: put into this tier only.

        Returns:
            What became of each chunk, by tier. A tier that failed or is left out is missing.

        Raises:
            ValueError: the lists differ in length, or there is no such tier.
        """
        with References(objs):
            if len(keys) != len(objs):
                raise ValueError(f"{len(keys)} keys for {len(objs)} objects")
            tiers = self._tiers.active(None if location is None else [location])
            if self._tiers.frozen or not keys:
                return {}
            self.cost.note_stored(keys)
            results = {
                backend.name: self._transfer.put(backend, keys, objs, self.allocator_backend)
                for backend in tiers
            }
            return {name: done for name, done in results.items() if done is not None}

    def contains(
        self,
        key: ChunkKey,
        search_range: Collection[str] | None = None,
        *,
        pin: Lease | None = None,
    ) -> str | None:
        """Name of the first tier that has the chunk; see :meth:`get_block_mapping`."""
        runs = self.get_block_mapping([key], search_range, pin=pin)
        return runs[0].location if runs else None

    def batched_contains(
        self,
        keys: Sequence[ChunkKey],
        search_range: Collection[str] | None = None,
        *,
        pin: Lease | None = None,
    ) -> int:
        """Length of the run of chunks that are somewhere; see :meth:`get_block_mapping`."""
        runs = self.get_block_mapping(keys, search_range, pin=pin)
        return runs[-1].end if runs else 0

    def known_run(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the run of chunks that are known to be where lookups find them.

        Asks no slow medium.
        """
        runs = self._search.locate_known(keys)
        return runs[-1].end if runs else 0

    def get_block_mapping(
        self,
        keys: Sequence[ChunkKey],
        search_range: Collection[str] | None = None,
        *,
        pin: Lease | None = None,
        to_load: bool = False,
    ) -> list[LocatedRun]:
        """Which tier holds which chunk of a prefix.

        Args:
            keys: the chunks of a prompt in order.
            search_range: names of the tiers to ask; all if None.
            pin: a lease that becomes the owner of a pin on each chunk that is found.
            to_load: leave out tiers from which loading would not pay, as with ``pin``.

        Returns:
            Runs without gaps from the first chunk on; chunks after the last run are nowhere.

        Raises:
            ValueError: a tier in ``search_range`` does not exist.
        """
        return self._search.locate(keys, search_range, pin, to_load=to_load or pin is not None)

    def get(self, key: ChunkKey) -> MemoryObj | None:
        """A chunk from the first tier that has it, with a reference for the caller."""
        for backend in self._tiers.readable():
            obj = self.batched_get([key], backend.name)[0]
            if obj is not None:
                return obj
        return None

    def batched_get(self, keys: Sequence[ChunkKey], location: str) -> list[MemoryObj | None]:
        """Chunks of one tier, position by position, each with a reference for the caller.

        What comes from another tier than the first is put into the first one as well. A tier that
        fails, or is left out, has nothing.

        Raises:
            ValueError: there is no such tier.
        """
        tiers = self._tiers.readable([location])
        if not tiers or not keys:
            return [None] * len(keys)
        return self._transfer.get(tiers[0], keys)

    def layerwise_batched_get(
        self,
        keys_layer_major: Sequence[Sequence[LayerKey]],
        location: str | Sequence[LocatedRun],
    ) -> Generator[Future[list[MemoryObj | None]], None, None]:
        """One future per layer, each of the whole chunks, position by position.

        A chunk is one object with all its layers, so all futures answer with the same objects.
        There is one reference per chunk in total; it belongs to whoever was given the first layer's
        future, from then on, also if the generator is dropped. The futures cannot be cancelled and
        never raise.

        Args:
            keys_layer_major: per layer, the names of that layer in every chunk.
            location: name of the tier, or what :meth:`get_block_mapping` answered for these chunks.
                The tiers are then asked at once, and chunks after the last run are misses.

        Raises:
            ValueError: there is no such tier, or the layers differ in their number of chunks.
        """
        if len({len(layer) for layer in keys_layer_major}) > 1:
            raise ValueError("every layer needs the same chunks")
        chunks = [key.chunk for key in keys_layer_major[0]] if keys_layer_major else []
        runs = [LocatedRun(location, 0, len(chunks))] if isinstance(location, str) else location
        tiers = [self._tiers.readable([run.location]) for run in runs]
        if keys_layer_major:
            parts = [(found[0], run) for found, run in zip(tiers, runs, strict=True) if found]
            future = self._transfer.start_gets(chunks, parts)
            yield from [future] * len(keys_layer_major)

    def touch_cache(self, keys: Sequence[ChunkKey], location: str | None = None) -> None:
        """Note one use of each chunk, the last one first, in every tier or the one named."""
        for backend in self._tiers.active(None if location is None else [location]):
            self._guard.call(backend, "touch", partial(backend.touch_cache, keys), None)

    def note_order(self, keys: Sequence[ChunkKey]) -> None:
        """Let these chunks of one prompt, in order, be evicted from the last one on, everywhere."""
        for backend in self._tiers.active():
            self._guard.call(backend, "touch", partial(backend.note_order, keys), None)

    def remove(self, key: ChunkKey, locations: Collection[str] | None = None) -> int:
        """Remove a chunk from every tier or those named; returns from how many."""
        return self.batched_remove([key], locations)

    def batched_remove(
        self, keys: Sequence[ChunkKey], locations: Collection[str] | None = None
    ) -> int:
        """Remove chunks from every tier or those named; returns how many copies there were."""
        return sum(
            self._guard.call(backend, "remove", partial(backend.batched_remove, keys), 0)
            for backend in self._tiers.active(locations)
        )

    def async_lookup_and_prefetch(
        self,
        lookup_id: str,
        keys: Sequence[ChunkKey],
        cum_chunk_lengths: Sequence[int],
        search_range: Collection[str] | None = None,
        *,
        pin: bool = True,
    ) -> Future[Prefetched]:
        """Find the longest prefix, and have its chunks in memory by the time of the answer.

        Answered at once where all of it is in memory; else when the rest has come from slow tiers,
        or as much of it as there is room and time for. The future cannot be cancelled and never
        raises; :meth:`batched_unpin` gives the lookup up, which answers it with nothing.

        Args:
            lookup_id: names the event and the lease; an earlier lookup of this id is given up.
            keys: the chunks of a prompt in order.
            cum_chunk_lengths: tokens of the first n chunks, for n from 0 to all of them.
            search_range: names of the tiers to ask; all if None.
            pin: what was found is held by a lease; False only brings it into memory.

        Raises:
            ValueError: a tier in ``search_range`` does not exist.
        """
        return self._prefetcher.lookup(lookup_id, keys, cum_chunk_lengths, search_range, pin=pin)

    def claim_lease(self, lookup_id: str) -> Lease | None:
        """The lease of a lookup, which the caller must release; None if it has none any more.

        Waits for a lookup that is under way, at most until its deadline.
        """
        return self._prefetcher.claim(lookup_id)

    @property
    def prefetcher(self) -> Prefetcher:
        """Who brings chunks into memory; for tests and reports."""
        return self._prefetcher

    def batched_unpin(self, lookup_id: str) -> bool:
        """Give a lookup up: stop what is under way for it and end its unclaimed lease.

        Returns:
            False if there is neither.
        """
        stopped = self._prefetcher.stop(lookup_id)
        return self.leases.release(lookup_id) or stopped

    def keep_first(self, lookup_id: str, num_chunks: int) -> None:
        """Give back what the unclaimed lease of a lookup holds beyond its first chunks."""
        self.leases.keep_first(lookup_id, num_chunks)

    def clear(self, locations: Collection[str] | None = None) -> int:
        """Remove everything from every tier or those named; returns how many copies there were.

        A tier that fails at it, or is left out now, takes part again once it has been cleared.
        """
        return self._clearing.clear(locations)

    def close(self) -> None:
        """End all lookups and leases and close the tiers, the lowest one first.

        A second call does nothing.
        """
        self._prefetcher.stop_all()
        self.leases.release_all()
        for backend in reversed(self.storage_backends.values()):
            if backend is self.allocator_backend:
                self._prefetcher.close()
            self._guard.call(backend, "close", backend.close, None)
        self._prefetcher.close()
