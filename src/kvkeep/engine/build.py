"""CacheManager: builds a CacheEngine and everything under it from the settings, and ends it.

Called from the thread that sets a worker up and takes it down.

The codecs of a worker's tiers, from the settings, and what they add to its identity.

Called by CacheManager before the first key is made, and by connectors that check settings early.

open_disk: a worker's disk tier from the settings.

Called once, by CacheManager. Settings end here; below are plain values.

open_pool: a worker's pool from the settings, and what was chosen for it.

Called once, by CacheManager. Settings end here; below are plain values.

prefetch_options: bounds of a worker's prefetches from the settings.

Called once per process, by CacheManager and by the scheduler's side. Settings end here.

open_ranks: a worker's place among the ranks of its engine, from the settings.

Called once, by CacheManager. Settings end here; below are plain values.

open_remote: a worker's remote tier from the settings.

Called once, by CacheManager. Settings end here; below are plain values.

observe: what a worker shows of itself, from the settings: its metrics and the form of its log.

Called once per worker, by CacheManager. Settings end here; below are plain values.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, cast

from kvkeep.backends.base import AllocatorBackendInterface, StorageBackendInterface
from kvkeep.backends.disk.backend import DiskOptions, LocalDiskBackend
from kvkeep.backends.disk.index import DiskEntry
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.backends.plugins import build_plugin
from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.backend import RemoteBackend, RemoteOptions
from kvkeep.backends.remote.base import HEADER_BYTES, ConnectorOptions
from kvkeep.backends.remote.loads import BELIEVED_S
from kvkeep.codec.base import Codec
from kvkeep.codec.frame import ChunkMeta
from kvkeep.codec.names import choose_codec
from kvkeep.config import Settings
from kvkeep.config.base import RemoteURL
from kvkeep.config.settings import CpuSettings, RanksSettings, parse_listen
from kvkeep.engine.engine import CacheEngine
from kvkeep.errors import ConfigError, OwnershipError
from kvkeep.gpu.base import GPUConnectorInterface
from kvkeep.identity import CacheIdentity
from kvkeep.layout import KVLayout
from kvkeep.logs import json_logs
from kvkeep.memory.allocators import PagedAllocator
from kvkeep.memory.base import MemoryAllocatorInterface, dtype_name
from kvkeep.memory.factory import initialize_allocator, report_on, tensor_pool
from kvkeep.memory.placement import (
    DEFAULT_POOL_BYTES,
    NUMA_TOPIC,
    AllocatorReport,
    Choice,
    WantedSize,
    WorkerPlace,
    available_bytes,
    choose_node,
    choose_size,
    default_pool_bytes,
)
from kvkeep.memory.prefault import Prefaulter
from kvkeep.metrics import Metrics
from kvkeep.metrics.endpoint import EndpointOptions, MetricsEndpoint, place_of_rank
from kvkeep.metrics.spans import NO_SPANS, open_spans
from kvkeep.policy.base import CachePolicy
from kvkeep.policy.names import create_policy
from kvkeep.ranks.base import RankGroup, RankOptions
from kvkeep.ranks.first import FirstRank
from kvkeep.ranks.follower import FollowerRank
from kvkeep.storage.cost import CostOptions
from kvkeep.storage.health import HealthTimer
from kvkeep.storage.manager import StorageManager
from kvkeep.storage.prefetch import PrefetchOptions
from kvkeep.tokens import ChunkedTokenDatabase

_log = logging.getLogger(__name__)


@contextmanager
def observe(settings: Settings, place: WorkerPlace, metrics: Metrics) -> Iterator[None]:
    """Show what the settings ask for, until the end.

    An endpoint that cannot be opened (its port is taken, say) is logged and counted, and the cache
    works without it.
    """
    with ExitStack() as opened:
        if settings.log.format == "json":
            opened.enter_context(json_logs())
        endpoint = _open_endpoint(settings, place, metrics)
        if endpoint is not None:
            opened.callback(endpoint.close)
        yield


def _open_endpoint(
    settings: Settings, place: WorkerPlace, metrics: Metrics
) -> MetricsEndpoint | None:
    listen, token = settings.metrics.listen, settings.metrics.token
    cert, key = settings.metrics.tls_cert, settings.metrics.tls_key
    if listen is None:
        return None
    tls = (cert, key) if cert is not None and key is not None else None
    try:
        where = place_of_rank(parse_listen(listen), place.rank, place.num_ranks)
        endpoint = MetricsEndpoint(EndpointOptions(where, token, tls), metrics.exposition)
    except (OSError, ValueError) as error:
        metrics.failure("metrics", "listen", type(error).__name__)
        _log.warning(
            "metrics.listen = %s: nothing listens for rank %d: %s", listen, place.rank, error
        )
        return None
    _log.info("metrics of rank %d are at %s", place.rank, endpoint.place)
    return endpoint


#: Name of the identity's tag for a tier whose codec is lossy, followed by the tier's settings.
TAG = "kvkeep.codec."


def open_codecs(settings: Settings, layout: KVLayout, element: str | None) -> dict[str, Codec]:
    """The codec of each tier that has one, by the name of its group of settings.

    Args:
        settings: all settings.
        layout: of the engine's KV.
        element: element type of opaque pages; None if it is unknown.

    Raises:
        ConfigError: a codec cannot encode this engine's KV; says which can.
    """
    names = {"disk": settings.disk.codec, "remote": settings.remote.codec}
    return {
        tier: choose_codec(name, layout, element=element, setting=f"{tier}.codec")
        for tier, name in names.items()
    }


def with_codecs(identity: CacheIdentity, codecs: Mapping[str, Codec]) -> CacheIdentity:
    """The identity of what an engine with these codecs keeps.

    KV that went through a lossy codec is not what the model computed. So its keys are others, and
    no engine without that codec in that tier finds it, in no tier.

    Raises:
        IdentityError: the settings give a tag of such a name by hand.
    """
    tags = tuple((TAG + tier, codec.name) for tier, codec in codecs.items() if codec.lossy)
    return replace(identity, tags=tuple(sorted(identity.tags + tags))) if tags else identity


#: Of the time that a lookup has, what the disk may take; the rest is for keys and the way back.
_SHARE_OF_LOOKUP = 0.7
#: Of the pool, what stores that wait for the disk may hold.
_SHARE_OF_POOL = 4


def open_disk(
    settings: Settings,
    first: LocalCPUBackend,
    identity: CacheIdentity,
    metrics: Metrics,
    *,
    codec: Codec,
) -> LocalDiskBackend | None:
    """The disk tier over the pool of ``first``, or None if the settings name no directory.

    A directory that cannot be used is no error: it is logged, counted, and tried again later.
    """
    disk = settings.disk
    if disk.path is None:
        return None
    usage = tensor_pool(first.allocator).usage()
    pool_bytes = usage.used_bytes + usage.free_bytes
    return LocalDiskBackend(
        DiskOptions(
            path=disk.path,
            size_bytes=disk.size,
            codec=codec,
            threads=disk.threads,
            queue_bytes=min(disk.queue, pool_bytes // _SHARE_OF_POOL),
            load_timeout_s=disk.load_timeout,
            lookup_timeout_s=settings.lookup.timeout * _SHARE_OF_LOOKUP,
        ),
        identity=identity,
        allocator_backend=first,
        # A policy never looks at the values that it orders.
        policy=cast("CachePolicy[DiskEntry]", create_policy(disk.policy)),
        metrics=metrics,
    )


#: Of a pool that nothing is stored in, beside one chunk.
_PASSIVE_BYTES = 4096


def open_pool(
    cpu: CpuSettings, place: WorkerPlace, chunk_bytes: int
) -> tuple[MemoryAllocatorInterface, AllocatorReport]:
    """Make the pool.

    Args:
        cpu: its settings.
        place: the worker that it is for.
        chunk_bytes: size of a full chunk.

    Raises:
        ConfigError: the settings ask for what this machine does not have.
    """
    is_registrable = cpu.allocator == "paged"
    buffer_bytes = 0 if is_registrable else cpu.buffers
    try:
        wanted = WantedSize(cpu.size, cpu.first_rank_size, cpu.reserve)
        if place.is_passive:
            size_bytes = _PASSIVE_BYTES + chunk_bytes
            why_size = Choice("size", f"{size_bytes} bytes", "rank 0 stores, this one copies")
            buffer_bytes = 0
        else:
            size_bytes, why_size = choose_size(wanted, place, available_bytes())
            _warn_of_no_room(size_bytes, chunk_bytes)
        allocator = initialize_allocator(
            size_bytes + buffer_bytes,
            chunk_bytes=chunk_bytes,
            buffer_bytes=buffer_bytes,
            is_registrable=is_registrable,
            shared_name=None if place.is_passive else _shared_name(cpu, place),
            shareable=place.first_rank_only and not place.is_passive,
            huge_pages=cpu.huge_pages,
            numa=_numa(cpu, place),
        )
    except (ValueError, OwnershipError, OSError) as error:
        raise ConfigError(f"the pool cannot be made as the settings of cpu say: {error}") from error
    return allocator, report_on(allocator, *_decided(cpu, why_size))


def start_prefault(cpu: CpuSettings, allocator: MemoryAllocatorInterface) -> Prefaulter | None:
    """The thread that commits memory ahead, if the settings want one."""
    pool = tensor_pool(allocator)
    if not cpu.prefault or not isinstance(pool, PagedAllocator):
        return None
    return Prefaulter(pool, ahead_bytes=cpu.prefault, keep_free_bytes=cpu.reserve or 0)


def _warn_of_no_room(size_bytes: int, chunk_bytes: int) -> None:
    if size_bytes < chunk_bytes:
        _log.warning(
            "nothing is kept: the pool has %d bytes and a chunk needs %d; make cpu.size larger or "
            "chunk_size smaller",
            size_bytes,
            chunk_bytes,
        )


def _shared_name(cpu: CpuSettings, place: WorkerPlace) -> str | None:
    if cpu.shared_name is None or place.num_ranks == 1:
        return cpu.shared_name
    return f"{cpu.shared_name}-{place.rank}"


def _numa(cpu: CpuSettings, place: WorkerPlace) -> tuple[int | None, Choice]:
    if cpu.numa == "off":
        return None, Choice(NUMA_TOPIC, "any", "off, as set")
    given = None if isinstance(cpu.numa, str) else dict(cpu.numa)
    return choose_node(place.cuda_device, given)


def _decided(cpu: CpuSettings, size: Choice) -> list[Choice]:
    """What the settings decided before there was an allocator."""
    is_paged = cpu.allocator == "paged"
    why = "KV and byte buffers have a pool each"
    if is_paged:
        why = "slots can be registered for transfers; byte buffers take slots, not cpu.buffers"
    ahead = f"{cpu.prefault} bytes ahead" if cpu.prefault else "when it is first used"
    return [
        Choice("allocator", cpu.allocator, why),
        size,
        Choice("memory is committed", ahead, "as cpu.prefault says"),
    ]


#: Of the pool, what waiting requests may hold unless the settings say it.
_PREFETCH_SHARE_OF_POOL = 2
#: Bytes that one lookup asks of a tier at once, in whole chunks.
_WINDOW_BYTES = 8 << 20
_MAX_WINDOW_CHUNKS = 16


def prefetches(settings: Settings) -> bool:
    """Lookups are answered later where chunks have to travel first."""
    return settings.has_slow_tier and settings.prefetch.enabled is not False


def prefetch_options(
    settings: Settings, first: LocalCPUBackend, chunk_bytes: int
) -> PrefetchOptions:
    """The bounds, for a pool that is already there.

    Args:
        settings: all settings.
        first: the tier that owns the pool.
        chunk_bytes: bytes of a chunk.
    """
    usage = tensor_pool(first.allocator).usage()
    memory_bytes = settings.prefetch.memory
    if memory_bytes is None:
        memory_bytes = (usage.used_bytes + usage.free_bytes) // _PREFETCH_SHARE_OF_POOL
    return PrefetchOptions(
        max_chunks=max(1, memory_bytes // chunk_bytes),
        timeout_s=settings.prefetch.timeout,
        window_chunks=min(_MAX_WINDOW_CHUNKS, max(1, _WINDOW_BYTES // chunk_bytes)),
    )


def is_first_rank_only(ranks: RanksSettings, *, has_same_kv: bool, is_one_machine: bool) -> bool:
    """Rank 0 alone stores.

    Args:
        ranks: the settings.
        has_same_kv: the KV of a token is the same on every rank.
        is_one_machine: all ranks can map rank 0's memory.

    Raises:
        ConfigError: the settings want it, and it would give ranks KV that is not theirs.
    """
    can = has_same_kv and is_one_machine
    if ranks.save_only_first_rank and not can:
        why = "each rank has KV of its own" if not has_same_kv else "there are several machines"
        raise ConfigError(f"ranks.save_only_first_rank cannot be on here: {why}")
    return can and ranks.save_only_first_rank is not False


def open_ranks(
    ranks: RanksSettings,
    place: WorkerPlace,
    socket: Path | None,
    identity: CacheIdentity,
    *,
    allocator: MemoryAllocatorInterface,
    metrics: Metrics,
) -> RankGroup | None:
    """This worker's side of its engine's group; None for an engine of one rank.

    Without a socket the ranks do not load together, and whoever drives them has to see to it that
    what one of them lacks is used on none.

    Args:
        ranks: the settings.
        place: the worker.
        socket: where the ranks meet; its directory is private to the user.
        identity: the worker's.
        allocator: its pool.
        metrics: where failures of other ranks are counted.

    Raises:
        ConfigError: rank 0 stores for all, and there is no place to meet.
        RankError: rank 0 cannot listen.
    """
    if socket is None and place.first_rank_only:
        raise ConfigError("ranks that copy out of rank 0's memory need a socket where they meet")
    if socket is None or place.num_ranks == 1:
        return None
    options = RankOptions(
        socket=socket,
        rank=place.rank,
        num_ranks=place.num_ranks,
        shares_kv=place.first_rank_only,
        timeout_s=ranks.timeout,
        identity=replace(identity, rank=0).digest(),
    )
    if place.rank:
        return FollowerRank(options, metrics=metrics)
    arena = tensor_pool(allocator).arena if place.first_rank_only else None
    return FirstRank(options, metrics=metrics, arena=arena)


#: Of the pool, what stores that wait for the store may hold.


def open_remote(
    settings: Settings,
    first: LocalCPUBackend,
    identity: CacheIdentity,
    metrics: Metrics,
    *,
    codec: Codec,
    kv: GPUConnectorInterface,
) -> RemoteBackend | None:
    """The remote tier over the pool of ``first``, or None if the settings name no store.

    A store that does not answer is no error: it is logged, counted, and tried again later.

    Args:
        settings: all settings.
        first: the CPU tier.
        identity: what the chunks belong to.
        metrics: where the tier counts.
        codec: of the tier.
        kv: says what a full chunk is.

    Raises:
        ConfigError: the URL is wrong for its kind of store.
        MissingExtraError: the store's client library is not installed.
    """
    remote = settings.remote
    if remote.url is None:
        return None
    shape, dtype, fmt = kv.chunk_shape(settings.chunk_size)
    chunk = ChunkMeta(fmt, dtype_name(dtype), tuple(shape))
    connector = create_connector(
        RemoteURL.parse(remote.url),
        ConnectorOptions(
            connections=remote.threads,
            connect_timeout_s=remote.connect_timeout,
            ttl_s=remote.ttl,
            max_value_bytes=HEADER_BYTES + chunk.size_bytes,
        ),
    )
    pool = tensor_pool(first.allocator)
    usage = pool.usage()
    connector.register(pool.arena.array.data)
    return RemoteBackend(
        connector,
        RemoteOptions(
            threads=remote.threads,
            queue_bytes=min(remote.queue, (usage.used_bytes + usage.free_bytes) // _SHARE_OF_POOL),
            load_timeout_s=remote.load_timeout,
            store_timeout_s=remote.store_timeout,
            lookup_timeout_s=settings.lookup.timeout * remote.lookup_share,
            probe_timeout_s=2 * remote.connect_timeout,
            believed_s=BELIEVED_S if remote.ttl is None else min(BELIEVED_S, remote.ttl),
        ),
        identity=identity,
        full_chunk=chunk,
        codec=codec,
        allocator_backend=first,
        metrics=metrics,
    )


__all__ = ["DEFAULT_POOL_BYTES", "BackendFactory", "CacheManager", "default_pool_bytes"]


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
                the user; see :func:`kvkeep.engine.build.open_ranks`.
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
