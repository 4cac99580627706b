"""Where a vLLM worker stands: ranks, machine, GPU and whether its KV is the others' too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import ParallelConfig

from kvkeep.connectors.vllm.build import worker_place
from kvkeep.memory.sizing import WorkerPlace


def place(device: str, *, use_mla: bool = False, **parallel: object) -> WorkerPlace:
    config = SimpleNamespace(
        parallel_config=ParallelConfig(**parallel), model_config=SimpleNamespace(use_mla=use_mla)
    )
    caches = {"layer": SimpleNamespace(device=torch.device(device))}
    return worker_place(config, caches)


def test_one_worker_on_the_cpu() -> None:
    assert place("cpu") == WorkerPlace()


def test_a_worker_among_others_knows_its_gpu_and_whether_kv_is_shared() -> None:
    found = place("cuda:1", use_mla=True, tensor_parallel_size=2, rank=1)
    assert found == WorkerPlace(rank=1, num_ranks=2, num_local=2, has_same_kv=True, cuda_device=1)
