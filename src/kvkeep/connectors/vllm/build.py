"""Builds the two sides of the connector from vLLM's configuration.

Called once per process, at the engine's start.

kvkeep's settings as a vLLM engine gives them, and what follows from the engine's block size.

Called once in the scheduler's process and once per worker; both arrive at the same values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.config import Settings, resolve_settings
from kvkeep.connectors.vllm.identity import (
    adapter_facts,
    are_inputs_hashed,
    block_size_of,
    check_supported,
    declare_layout,
    stores_on_first_rank_only,
    worker_identity,
    worker_place,
)
from kvkeep.connectors.vllm.scheduler import SchedulerOptions, SchedulerSide
from kvkeep.connectors.vllm.worker import Cores, WorkerSide
from kvkeep.engine.build import CacheManager, open_codecs, prefetches
from kvkeep.errors import ConfigError, LookupServiceError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.sockets import (
    check_private,
    make_private,
    ranks_path,
    socket_directory,
    socket_path,
)
from kvkeep.memory.base import dtype_name

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def engine_settings(
    extra_config: Mapping[str, object], env: Mapping[str, str], *, block_size: int
) -> Settings:
    """The settings, with a chunk size that is a whole number of blocks.

    Args:
        extra_config: vLLM's ``kv_connector_extra_config``.
        env: environment variables.
        block_size: tokens in a block of the engine.

    Raises:
        ConfigError: a setting is wrong, or the chunk size that was asked for is no whole number of
            blocks. The default one is rounded up instead.
    """
    loaded = resolve_settings(env=env, extra=extra_config)
    settings = loaded.settings
    rest = settings.chunk_size % block_size
    if rest == 0:
        return settings
    fitting = settings.chunk_size - rest + block_size
    if "chunk_size" in loaded.origins:
        raise ConfigError(
            f"chunk_size = {settings.chunk_size} ({loaded.origins['chunk_size']}) is no multiple "
            f"of the engine's block size {block_size}; {fitting} is"
        )
    return settings.model_copy(update={"chunk_size": fitting})


def check_codecs(settings: Settings, kv_cache_config: KVCacheConfig) -> None:
    """Refuse codecs that cannot encode pages of this engine, before it starts.

    Raises:
        ConfigError: a tier's codec cannot; says which can.
    """
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    group = GroupLayout("full", 1, spec.real_page_size_bytes)
    pages = KVLayout(
        MemoryFormat.OPAQUE_PAGES, "uint8", spec.block_size, (group,), 0, 0, engine="vllm"
    )
    open_codecs(settings, pages, dtype_name(spec.dtype))


def socket_paths(
    settings: Settings, env: Mapping[str, str], *, engine_id: str, world_size: int
) -> list[Path]:
    """The lookup socket of each rank.

    Raises:
        LookupServiceError: the paths are too long.
    """
    directory = socket_directory(settings.lookup.socket_dir, env)
    return [socket_path(directory, engine_id, rank) for rank in range(world_size)]


logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that it is shown

#: How long the scheduler waits for the workers at the start. They are ready before it is built, so
#: whoever has not answered by then is switched off.
HELLO_TIMEOUT_S = 10.0

#: How long a worker waits for the other ranks, which start at the same time.
_RANKS_S = 5.0
#: Of what is left of a lease after its lookup took as long as it may, how much is relied upon.
_HOLD_SHARE = 0.5


def build_worker(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    env: Mapping[str, str],
    kv_caches: Mapping[str, torch.Tensor],
) -> WorkerSide:
    """The worker's side, with caches registered and its lookup server running.

    Raises:
        LayoutError: kvkeep cannot keep such caches; prints them.
        IdentityError: nothing tells this model from others.
        LookupServiceError, RankError: a socket cannot be bound.
    """
    layout, tensors = declare_layout(vllm_config, kv_cache_config, kv_caches)
    place = worker_place(vllm_config, settings, kv_caches)
    identity = worker_identity(
        vllm_config,
        layout,
        chunk_size=settings.chunk_size,
        settings=settings.identity,
        is_same_on_all_ranks=place.first_rank_only,
    )
    engine_id = vllm_config.kv_transfer_config.engine_id
    paths = socket_paths(settings, env, engine_id=engine_id, world_size=place.num_ranks)
    make_private(paths[0].parent)
    connector = PagedGPUConnector(
        layout, copy_threads=settings.cpu.copy_threads, huge_pages=settings.cpu.huge_pages
    )
    cores = Cores()
    with cores.all_of_them():
        connector.register_kv_caches(tensors)
        manager = CacheManager.create(
            settings,
            identity,
            connector,
            place=place,
            ranks_socket=ranks_path(paths[0].parent, engine_id),
        )
        try:
            worker = WorkerSide(
                manager,
                identity=manager.engine.token_database.identity,
                rank=place.rank,
                socket=paths[place.rank],
                block_size=layout.page_size,
                runs_ahead=tensors[0].device.type != "cpu",
                cores=cores,
            )
        except BaseException:
            manager.close()
            raise
    if not manager.engine.wait_for_ranks(_RANKS_S):
        logger.warning("other ranks are not there yet; until they are, nothing is found")
    logger.info("kvkeep keeps %d layers: %s", layout.num_layers, layout.engine)
    return worker


def build_scheduler(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    env: Mapping[str, str],
) -> SchedulerSide:
    """The scheduler's side, connected to the workers.

    Raises:
        LayoutError: kvkeep cannot keep the KV of this model.
        LookupServiceError: a worker does not answer, or answers for another chunk size.
    """
    check_supported(vllm_config, kv_cache_config)
    transfer = vllm_config.kv_transfer_config
    world_size = vllm_config.parallel_config.world_size
    if stores_on_first_rank_only(vllm_config, settings):
        world_size = 1  # rank 0 knows all that is stored
    paths = socket_paths(settings, env, engine_id=transfer.engine_id, world_size=world_size)
    check_private(paths[0].parent)
    lookup, prefetch = settings.lookup, settings.prefetch
    client = LookupClient(paths, timeout_s=lookup.timeout, prefetch_timeout_s=prefetch.timeout)
    try:
        for rank, reply in enumerate(client.hello(timeout_s=HELLO_TIMEOUT_S)):
            if (reply.rank, reply.chunk_size) != (rank, settings.chunk_size):
                raise LookupServiceError(
                    f"the lookup server of rank {rank} is another one: {reply}"
                )
    except BaseException:
        client.close()
        raise
    options = SchedulerOptions(
        chunk_size=settings.chunk_size,
        block_size=block_size_of(kv_cache_config),
        store_decode=settings.store_decode,
        save_unfull_chunk=settings.save_unfull_chunk,
        may_load=transfer.is_kv_consumer,
        may_store=transfer.is_kv_producer,
        prefetches=prefetches(settings),
        hold_s=_HOLD_SHARE * (lookup.lease - prefetch.timeout),
        loads_between_steps=settings.load.asynchronous,
        adapter_settings=adapter_facts(vllm_config),
        inputs_are_hashed=are_inputs_hashed(vllm_config),
    )
    return SchedulerSide(client, options)
