"""CacheManager: builds a CacheEngine and everything under it from the settings, and ends it.

Called from the thread that sets a worker up and takes it down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import psutil

from kvkeep.backends.base import AllocatorBackendInterface, StorageBackendInterface
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.config import Settings
from kvkeep.engine import CacheEngine
from kvkeep.errors import ConfigError
from kvkeep.gpu.base import GPUConnectorInterface
from kvkeep.identity import CacheIdentity
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.names import create_policy
from kvkeep.storage.manager import StorageManager
from kvkeep.tokens import ChunkedTokenDatabase

#: Makes a further tier out of the one whose memory it reads from and fills.
BackendFactory = Callable[[AllocatorBackendInterface], StorageBackendInterface]

#: Size of the pool, unless half of the available memory is less.
DEFAULT_POOL_BYTES = 5_000_000_000


def default_pool_bytes() -> int:
    """Size of the pool without a setting: 5 GB or half of the available memory."""
    return min(DEFAULT_POOL_BYTES, psutil.virtual_memory().available // 2)


@dataclass(frozen=True, slots=True)
class CacheManager:
    """Owner of an engine. Use it as a context manager, or close it.

    Attributes:
        engine: the cache.
        storage: its tiers.
        metrics: what happened.
        settings: what it was built from.
    """

    engine: CacheEngine
    storage: StorageManager
    metrics: Metrics
    settings: Settings

    @classmethod
    def create(
        cls,
        settings: Settings,
        identity: CacheIdentity,
        connector: GPUConnectorInterface,
        *,
        extra_backends: Sequence[BackendFactory] = (),
    ) -> CacheManager:
        """Build everything. What was built is closed again if a part cannot be.

        Args:
            settings: all settings.
            identity: what the chunks belong to.
            connector: to the engine's caches; closed with the manager.
            extra_backends: tiers below the CPU tier, in order of priority.

        Raises:
            ConfigError: the chunk size of the settings is not the identity's.
            LayoutError: the connector moves another layout than the identity names, or a chunk is
                no whole number of pages.
        """
        if settings.chunk_size != identity.chunk_size:
            raise ConfigError(
                f"chunk_size is {settings.chunk_size} in the settings and {identity.chunk_size} in "
                "the identity"
            )
        tokens = ChunkedTokenDatabase(identity, save_unfull_chunk=settings.save_unfull_chunk)
        metrics = Metrics()
        cpu = settings.cpu
        allocator = initialize_allocator(
            cpu.size if cpu.size is not None else default_pool_bytes(),
            chunk_bytes=identity.layout.chunk_bytes(identity.chunk_size),
            huge_pages=cpu.huge_pages,
        )
        opened: list[StorageBackendInterface] = []
        try:
            first = LocalCPUBackend(
                allocator,
                create_policy(cpu.policy),
                metrics=metrics,
                alloc_timeout_s=cpu.alloc_timeout,
            )
            opened.append(first)
            opened.extend(make(first) for make in extra_backends)
            storage = StorageManager(
                opened,
                allocator_backend=first,
                metrics=metrics,
                lease_timeout_s=settings.lookup.lease,
            )
            engine = CacheEngine(
                token_database=tokens,
                gpu_connector=connector,
                storage_manager=storage,
                metrics=metrics,
            )
        except BaseException:
            for backend in reversed(opened):
                backend.close()
            allocator.close()
            raise
        return cls(engine, storage, metrics, settings)

    def close(self) -> None:
        """End everything; a second call does nothing."""
        self.engine.close()

    def __enter__(self) -> CacheManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
