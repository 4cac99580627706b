"""CacheManager: builds a CacheEngine and everything under it from the settings, and ends it.

Called from the thread that sets a worker up and takes it down.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from kvkeep.backends.base import AllocatorBackendInterface, StorageBackendInterface
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.backends.plugins import build_plugin
from kvkeep.config import Settings
from kvkeep.engine import CacheEngine
from kvkeep.errors import ConfigError
from kvkeep.gpu.base import GPUConnectorInterface
from kvkeep.identity import CacheIdentity
from kvkeep.memory.report import AllocatorReport
from kvkeep.memory.sizing import DEFAULT_POOL_BYTES, WorkerPlace, default_pool_bytes
from kvkeep.metrics import Metrics
from kvkeep.metrics.spans import NO_SPANS, open_spans
from kvkeep.observing import observe
from kvkeep.opening_codecs import open_codecs, with_codecs
from kvkeep.opening_disk import open_disk
from kvkeep.opening_pool import open_pool, start_prefault
from kvkeep.opening_prefetch import prefetch_options
from kvkeep.opening_ranks import open_ranks
from kvkeep.opening_remote import open_remote
from kvkeep.policy.names import create_policy
from kvkeep.storage.cost import CostOptions
from kvkeep.storage.health import HealthTimer
from kvkeep.storage.manager import StorageManager
from kvkeep.tokens import ChunkedTokenDatabase

__all__ = ["DEFAULT_POOL_BYTES", "BackendFactory", "CacheManager", "default_pool_bytes"]

_log = logging.getLogger(__name__)

#: Makes a further tier out of the one whose memory it reads from and fills.
BackendFactory = Callable[[AllocatorBackendInterface], StorageBackendInterface]

_ALONE = WorkerPlace()


@dataclass(frozen=True, slots=True)
class CacheManager:
    """Owner of an engine. Use it as a context manager, or close it.

    Attributes:
        engine: the cache.
        storage: its tiers.
        metrics: what happened.
        settings: what it was built from.
        allocator_report: what was chosen for the pool, and why.
    """

    engine: CacheEngine
    storage: StorageManager
    metrics: Metrics
    settings: Settings
    allocator_report: AllocatorReport
    _closing: ExitStack
    _process: int = field(default_factory=os.getpid)

    @classmethod
    def create(
        cls,
        settings: Settings,
        identity: CacheIdentity,
        connector: GPUConnectorInterface,
        *,
        place: WorkerPlace = _ALONE,
        ranks_socket: Path | None = None,
        extra_backends: Sequence[BackendFactory] = (),
    ) -> CacheManager:
        """Build everything. What was built is closed again if a part cannot be.

        Args:
            settings: all settings.
            identity: what the chunks belong to; lossy codecs in the settings are added to it.
            connector: to the engine's caches; closed with the manager.
            place: where the worker stands among others, and on which device.
            ranks_socket: where the ranks of this engine meet, in a directory that is private to
                the user; see :func:`kvkeep.opening_ranks.open_ranks`.
            extra_backends: tiers below kvkeep's own, in order, above the plugins.

        Raises:
            ConfigError: the chunk size of the settings is not the identity's, the machine cannot
                give the pool that the settings ask for, a codec cannot encode this engine's KV, the
                remote store's URL is wrong, or a plugin cannot be built.
            MissingExtraError: the settings ask for spans or a store whose library is missing.
            LayoutError: the connector moves another layout than the identity names, or a chunk is
                no whole number of pages.
            RankError: rank 0 cannot be found by the others.
        """
        if settings.chunk_size != identity.chunk_size:
            raise ConfigError(
                f"chunk_size is {settings.chunk_size} in the settings and {identity.chunk_size} in "
                "the identity"
            )
        codecs = open_codecs(settings, identity.layout, connector.element_dtype)
        identity = with_codecs(identity, codecs)
        tokens = ChunkedTokenDatabase(identity, save_unfull_chunk=settings.save_unfull_chunk)
        metrics = Metrics(spans=open_spans() if settings.tracing.spans else NO_SPANS)
        chunk_bytes = identity.layout.chunk_bytes(identity.chunk_size)
        with ExitStack() as opened:
            allocator, report = open_pool(settings.cpu, place, chunk_bytes)
            opened.callback(allocator.close)
            first = LocalCPUBackend(
                allocator,
                create_policy(settings.cpu.policy),
                metrics=metrics,
                alloc_timeout_s=settings.cpu.alloc_timeout,
            )
            opened.callback(first.close)
            tiers: list[StorageBackendInterface] = [first]
            ranks = open_ranks(
                settings.ranks, place, ranks_socket, identity, allocator=allocator, metrics=metrics
            )
            _close_later(ranks, opened)
            if not place.is_passive:
                disk = open_disk(settings, first, identity, metrics, codec=codecs["disk"])
                _add(disk, tiers, opened)
                remote = open_remote(
                    settings, first, identity, metrics, codec=codecs["remote"], kv=connector
                )
                _add(remote, tiers, opened)
                _open_further_tiers(settings, tiers, extra_backends, opened)
            storage = StorageManager(
                tiers,
                allocator_backend=first,
                metrics=metrics,
                lease_timeout_s=settings.lookup.lease,
                cost=_cost(settings, chunk_bytes),
                prefetching=prefetch_options(settings, first, chunk_bytes),
            )
            engine = CacheEngine(
                token_database=tokens,
                gpu_connector=connector,
                storage_manager=storage,
                metrics=metrics,
                health_timeout_s=settings.health.timeout,
                remove_after_retrieve=settings.remove_after_retrieve,
                ranks=ranks,
            )
            opened.pop_all()  # from here on, the engine closes them
            opened.callback(engine.close)
            opened.enter_context(observe(settings, place, metrics))
            prefaulter = start_prefault(settings.cpu, allocator)
            _close_later(prefaulter, opened)
            opened.callback(_start_timer(settings, engine, metrics).close)
            closing = opened.pop_all()
        _log.info("pool: %s", "; ".join(report.lines()))
        return cls(engine, storage, metrics, settings, report, closing)

    def close(self) -> None:
        """End everything; a second call does nothing, nor does one in a forked process.

        There no thread runs that could be ended, and files and sockets are the other one's.
        """
        if os.getpid() == self._process:
            self._closing.close()

    def __enter__(self) -> CacheManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _start_timer(settings: Settings, engine: CacheEngine, metrics: Metrics) -> HealthTimer:
    return HealthTimer(
        engine.health,
        interval_s=settings.health.interval,
        timeout_s=settings.health.timeout,
        on_error=lambda error: metrics.failure("engine", "health", type(error).__name__),
    )


def _cost(settings: Settings, chunk_bytes: int) -> CostOptions:
    """How loading is weighed against computing again."""
    return CostOptions(
        chunk_tokens=settings.chunk_size,
        chunk_bytes=chunk_bytes,
        enabled=settings.cost.enabled,
        retry_s=settings.cost.retry,
    )


class _Closable(Protocol):
    def close(self) -> object: ...


def _close_later(part: _Closable | None, opened: ExitStack) -> None:
    """Let ``opened`` close a part, if there is one."""
    if part is not None:
        opened.callback(part.close)


def _add(
    tier: StorageBackendInterface | None, tiers: list[StorageBackendInterface], opened: ExitStack
) -> None:
    """Add a tier, if there is one; ``opened`` closes it."""
    _close_later(tier, opened)
    if tier is not None:
        tiers.append(tier)


def _open_further_tiers(
    settings: Settings,
    tiers: list[StorageBackendInterface],
    extra_backends: Sequence[BackendFactory],
    opened: ExitStack,
) -> None:
    """Add the caller's tiers and the plugins to ``tiers``; ``opened`` closes what was made."""
    first = tiers[0].get_allocator_backend()
    for make in extra_backends:
        _add(make(first), tiers, opened)
    for plugin in settings.plugins:
        taken = [tier.name for tier in tiers]
        _add(build_plugin(plugin, first, taken=taken), tiers, opened)
