"""Where a vLLM worker stands: ranks, machine, GPU, and whether rank 0 stores for all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import ParallelConfig

from kvkeep.config import load_settings
from kvkeep.connectors.vllm.identity import stores_on_first_rank_only, worker_place
from kvkeep.errors import ConfigError
from kvkeep.memory.placement import WorkerPlace


def config_of(*, use_mla: bool = False, num_machines: int = 1, **parallel: object):
    own = ParallelConfig(**parallel)
    ranks = SimpleNamespace(
        rank=own.rank,
        world_size=own.world_size,
        local_world_size=own.world_size // num_machines,
        pipeline_parallel_size=own.pipeline_parallel_size,
    )
    return SimpleNamespace(
        parallel_config=ranks if num_machines > 1 else own,
        model_config=SimpleNamespace(use_mla=use_mla),
    )


def place(device: str, settings: dict[str, object] | None = None, **config: object) -> WorkerPlace:
    caches = {"layer": SimpleNamespace(device=torch.device(device))}
    return worker_place(config_of(**config), load_settings(extra=settings or {}), caches)


def test_one_worker_on_the_cpu() -> None:
    assert place("cpu") == WorkerPlace()
    assert place("cpu", use_mla=True) == WorkerPlace(has_same_kv=True)


def test_a_worker_among_others_knows_its_gpu_and_whether_kv_is_shared() -> None:
    found = place("cuda:1", use_mla=True, tensor_parallel_size=2, rank=1)
    assert found == WorkerPlace(
        rank=1, num_ranks=2, num_local=2, has_same_kv=True, first_rank_only=True, cuda_device=1
    )
    assert found.is_passive
    found = place("cuda:1", tensor_parallel_size=2, rank=1)
    assert found == WorkerPlace(rank=1, num_ranks=2, num_local=2, cuda_device=1)
    assert not found.is_passive


def test_it_can_be_switched_off() -> None:
    off = {"ranks.save_only_first_rank": False}
    found = place("cpu", off, use_mla=True, tensor_parallel_size=2, rank=1)
    assert (found.has_same_kv, found.first_rank_only, found.is_passive) == (True, False, False)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"tensor_parallel_size": 2}, "KV of its own"),
        ({"use_mla": True, "tensor_parallel_size": 2, "num_machines": 2}, "several machines"),
        ({"use_mla": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "of its own"),
    ],
)
def test_on_where_it_cannot_be_is_an_error_and_off_by_itself(config, why) -> None:
    on = load_settings(extra={"ranks.save_only_first_rank": True})
    with pytest.raises(ConfigError, match=why):
        stores_on_first_rank_only(config_of(**config), on)
    assert not stores_on_first_rank_only(config_of(**config), load_settings())
