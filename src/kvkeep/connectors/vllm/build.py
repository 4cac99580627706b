"""Builds the two sides of the connector from vLLM's configuration.

Called once per process, at the engine's start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvkeep.config import Settings
from kvkeep.connectors.vllm.identity import worker_identity
from kvkeep.connectors.vllm.layout import block_size_of, check_supported, declare_layout
from kvkeep.connectors.vllm.scheduler import SchedulerOptions, SchedulerSide
from kvkeep.connectors.vllm.settings import socket_paths
from kvkeep.connectors.vllm.worker import WorkerSide
from kvkeep.errors import LookupServiceError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.paths import check_private
from kvkeep.manager import CacheManager
from kvkeep.memory.sizing import WorkerPlace

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that it is shown

#: How long the scheduler waits for the workers at the start. They are ready before it is built, so
#: whoever has not answered by then is switched off.
HELLO_TIMEOUT_S = 10.0


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
        LookupServiceError: the lookup socket cannot be bound.
    """
    layout, tensors = declare_layout(vllm_config, kv_cache_config, kv_caches)
    identity = worker_identity(
        vllm_config, layout, chunk_size=settings.chunk_size, settings=settings.identity
    )
    paths = socket_paths(
        settings,
        env,
        engine_id=vllm_config.kv_transfer_config.engine_id,
        world_size=identity.world_size,
    )
    connector = PagedGPUConnector(layout, copy_threads=settings.cpu.copy_threads)
    connector.register_kv_caches(tensors)
    manager = CacheManager.create(
        settings, identity, connector, place=worker_place(vllm_config, kv_caches)
    )
    identity = manager.engine.token_database.identity
    try:
        worker = WorkerSide(
            manager, identity=identity, socket=paths[identity.rank], block_size=layout.page_size
        )
    except BaseException:
        manager.close()
        raise
    logger.info("kvkeep keeps %d layers: %s", layout.num_layers, layout.engine)
    return worker


def worker_place(vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> WorkerPlace:
    """Where a worker stands among its engine's, and on which GPU its caches are."""
    parallel = vllm_config.parallel_config
    device = next(iter(kv_caches.values())).device
    return WorkerPlace(
        rank=parallel.rank,
        num_ranks=parallel.world_size,
        num_local=parallel.local_world_size,
        has_same_kv=vllm_config.model_config.use_mla,
        cuda_device=device.index if device.type == "cuda" else None,
    )


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
    paths = socket_paths(settings, env, engine_id=transfer.engine_id, world_size=world_size)
    check_private(paths[0].parent)
    client = LookupClient(paths, timeout_s=settings.lookup.timeout)
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
    )
    return SchedulerSide(client, options)
