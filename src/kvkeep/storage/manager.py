"""StorageManager: the tiers as one hierarchy.

Callable from any thread. The order of the tiers is their priority. A tier that fails or is bypassed
is left out and the others go on; its faults are counted and never raised, the caller's are raised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NoReturn

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    PutOutcome,
    StorageBackendInterface,
)
from kvkeep.backends.lease import Lease
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.keys import ChunkKey, LayerKey
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.ownership import References
from kvkeep.metrics import Metrics
from kvkeep.prefix import LocatedRun
from kvkeep.storage.clearing import Clearing
from kvkeep.storage.cost import CostOptions, CostRule
from kvkeep.storage.guard import BackendGuard
from kvkeep.storage.leases import LeaseTable
from kvkeep.storage.pool_access import PoolAccess
from kvkeep.storage.prefetch import Prefetched, Prefetcher, PrefetchOptions
from kvkeep.storage.search import PrefixSearch
from kvkeep.storage.tier_control import TierControl
from kvkeep.storage.tiers import Tiers
from kvkeep.storage.transfer import Transfer


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
        self.cost = CostRule(cost or CostOptions(enabled=False), metrics)
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
