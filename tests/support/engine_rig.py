"""EngineRig: a real CacheEngine over a PagedEngine, small enough to fill and to drain.

For tests of engines, connectors and backends. Its pool holds an exact number of chunks; closing it
proves that nothing was left behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from kvkeep.backends.base import AllocatorBackendInterface, StorageBackendInterface
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.engine.engine import CacheEngine
from kvkeep.gpu.base import GPUConnectorInterface
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.layout import KVLayout
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.names import create_policy
from kvkeep.storage.manager import StorageManager
from kvkeep.storage.prefetch import PrefetchOptions
from kvkeep.tokens import ChunkedTokenDatabase
from support.paged_engine import PagedEngine

#: Slots of the pool are multiples of this.
_SLOT_ALIGNMENT = 64


class EngineRig:
    """An engine with memory of its own. Use it as a context manager.

    Attributes:
        model: the paged memory, and which bytes are right.
        engine: the engine under test.
        storage: its tiers.
        cpu: its first tier.
        metrics: what happened.
        chunk_size: tokens in a chunk.
    """

    def __init__(
        self,
        *,
        pool_chunks: int = 16,
        chunk_size: int = 8,
        num_pages: int = 64,
        num_layers: int = 3,
        policy: str = "lru",
        save_unfull_chunk: bool = False,
        lease_timeout_s: float = 300.0,
        alloc_timeout_s: float = 0.2,
        connector: Callable[[KVLayout], GPUConnectorInterface] = PagedGPUConnector,
        tiers: Sequence[Callable[[AllocatorBackendInterface], StorageBackendInterface]] = (),
        remove_after_retrieve: bool = False,
        prefetching: PrefetchOptions | None = None,
    ) -> None:
        """Build it; the caches are not registered.

        Args:
            pool_chunks: chunks that the pool has room for; 0 makes it smaller than one chunk.
            chunk_size: tokens in a chunk, a multiple of the page size 4.
            num_pages: pages of the engine.
            num_layers: layers of the engine.
            policy: name of the cache policy.
            save_unfull_chunk: store the tail, too.
            lease_timeout_s: seconds until a lease expires.
            alloc_timeout_s: seconds that a load waits for memory.
            connector: makes the connector.
            tiers: make further tiers from the first one.
            remove_after_retrieve: chunks are removed once they were loaded.
            prefetching: bounds of lookups that are answered later.
        """
        self.model = PagedEngine(num_pages=num_pages, num_layers=num_layers)
        layout = self.model.layout
        self.chunk_size = chunk_size
        slot = -(-layout.chunk_bytes(chunk_size) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        allocator = initialize_allocator(
            max(pool_chunks * slot, slot // 2), chunk_bytes=slot, huge_pages=False
        )
        self.metrics = Metrics()
        self.cpu = LocalCPUBackend(
            allocator, create_policy(policy), metrics=self.metrics, alloc_timeout_s=alloc_timeout_s
        )
        self.storage = StorageManager(
            [self.cpu, *[make(self.cpu) for make in tiers]],
            allocator_backend=self.cpu,
            metrics=self.metrics,
            lease_timeout_s=lease_timeout_s,
            prefetching=prefetching,
        )
        identity = CacheIdentity("rig", "1", layout, chunk_size=chunk_size)
        self.connector = connector(layout)
        self.engine = CacheEngine(
            token_database=ChunkedTokenDatabase(identity, save_unfull_chunk=save_unfull_chunk),
            gpu_connector=self.connector,
            storage_manager=self.storage,
            metrics=self.metrics,
            remove_after_retrieve=remove_after_retrieve,
        )

    def fill(self, tokens: Sequence[int], pages: Sequence[int] | None = None) -> None:
        """Prefill ``tokens`` into the engine's pages and store them."""
        pages = range(self.model.num_pages_for(len(tokens))) if pages is None else pages
        self.model.prefill(tokens, pages)
        slots = self.model.slots(pages, len(tokens))
        self.engine.store(tokens, kvcaches=self.model.caches, slot_mapping=slots)

    def expire_leases(self) -> None:
        """Let the deadlines of all leases that are open now pass, without waiting for it."""
        leases = self.storage.leases
        ahead_s = leases.timeout_s + 1.0
        leases._clock = lambda: time.monotonic() + ahead_s

    def check_idle(self) -> None:
        """Nothing is held: no lease, no memory but the chunks in the first tier.

        Raises:
            AssertionError: something is held; says what.
        """
        report = self.engine.check()
        if report.used_bytes + report.free_bytes != report.capacity_bytes:
            raise AssertionError(f"free + used is not the pool: {report}")
        if report.open_leases or report.num_objects != report.num_chunks:
            raise AssertionError(f"leases or memory are still held: {report}")
        for obj in list(self.cpu.hot_cache.values()):
            if obj.is_pinned or obj.ref_count != 1:
                raise AssertionError(f"a chunk is still held: {obj}")

    def __enter__(self) -> EngineRig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.check_idle()
        finally:
            self.engine.close()
