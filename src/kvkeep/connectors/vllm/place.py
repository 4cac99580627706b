"""Where a vLLM worker stands among the others of its engine, and whether rank 0 stores for all.

Asked once in the scheduler's process and once per worker; all arrive at the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvkeep.config import Settings
from kvkeep.memory.sizing import WorkerPlace
from kvkeep.opening_ranks import is_first_rank_only

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def stores_on_first_rank_only(vllm_config: VllmConfig, settings: Settings) -> bool:
    """Rank 0 stores and loads for all ranks.

    Raises:
        ConfigError: the settings want it, and the ranks' KV differs or they are not on one machine.
    """
    parallel = vllm_config.parallel_config
    return (
        is_first_rank_only(
            settings.ranks,
            has_same_kv=_has_same_kv(vllm_config),
            is_one_machine=parallel.local_world_size == parallel.world_size,
        )
        and parallel.world_size > 1
    )


def worker_place(
    vllm_config: VllmConfig, settings: Settings, kv_caches: Mapping[str, torch.Tensor]
) -> WorkerPlace:
    """The worker's rank, and on which GPU its caches are."""
    parallel = vllm_config.parallel_config
    device = next(iter(kv_caches.values())).device
    return WorkerPlace(
        rank=parallel.rank,
        num_ranks=parallel.world_size,
        num_local=parallel.local_world_size,
        has_same_kv=_has_same_kv(vllm_config),
        first_rank_only=stores_on_first_rank_only(vllm_config, settings),
        cuda_device=device.index if device.type == "cuda" else None,
    )


def _has_same_kv(vllm_config: VllmConfig) -> bool:
    """Latent attention: every rank of a tensor-parallel group computes the whole KV."""
    is_latent: bool = vllm_config.model_config.use_mla
    return is_latent and vllm_config.parallel_config.pipeline_parallel_size == 1
