"""Builds the two sides of the connector from vLLM's configuration.

Called once per process, at the engine's start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvkeep.config import Settings
from kvkeep.connectors.vllm.cores import Cores
from kvkeep.connectors.vllm.identity import worker_identity
from kvkeep.connectors.vllm.kv_settings import adapter_facts, are_inputs_hashed
from kvkeep.connectors.vllm.layout import block_size_of, check_supported, declare_layout
from kvkeep.connectors.vllm.place import stores_on_first_rank_only, worker_place
from kvkeep.connectors.vllm.scheduler import SchedulerOptions, SchedulerSide
from kvkeep.connectors.vllm.settings import socket_paths
from kvkeep.connectors.vllm.worker import WorkerSide
from kvkeep.errors import LookupServiceError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.paths import check_private, make_private, ranks_path
from kvkeep.manager import CacheManager
from kvkeep.opening_prefetch import prefetches

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

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
