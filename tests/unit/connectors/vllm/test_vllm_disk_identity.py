"""Fault 9 over restarts: which vLLM workers find each other's chunks in one directory."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.config import IdentitySettings
from kvkeep.connectors.vllm.identity import declare_layout, worker_identity
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.classic import LRUPolicy
from kvkeep.tokens import ChunkedTokenDatabase
from support.disk import make_disk

LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]
TOKENS = list(range(200, 300))


def _keys(folder, engine_config, *, chunk_size=32, settings=None, kv_dtype=torch.float32, **args):
    """Identity of a worker that has just started, and keys of the prompt under it."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=kv_dtype)
    cache_config = KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
        kv_cache_layout="LBHNC",
    )
    caches = {name: torch.zeros((10, 2, 16, 16), dtype=kv_dtype) for name in LAYERS}
    config = engine_config(model=str(folder), **args)
    layout, _ = declare_layout(config, cache_config, caches)
    identity = worker_identity(
        config, layout, chunk_size=chunk_size, settings=settings or IdentitySettings()
    )
    return identity, ChunkedTokenDatabase(identity).process_tokens(TOKENS).keys


def _new_weights(folder):
    (folder / "pytorch_model.bin").write_bytes(b"Weights")


def _new_rope(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_type": "default"}}))


OTHERS = {
    "weights": (_new_weights, {}),
    "rope in the config": (_new_rope, {}),
    "rope on the command line": (
        None,
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
    ),
    "dtype": (None, {"dtype": "bfloat16"}),
    "kv dtype": (None, {"dtype": "bfloat16", "kv_dtype": torch.bfloat16}),
    "chunk size": (None, {"chunk_size": 16}),
    "tags": (None, {"settings": IdentitySettings(tags=(("team", "a"),))}),
    "revision": (None, {"settings": IdentitySettings(revision="r1")}),
    "other files of the folder": (None, {"load_format": "pt"}),
}


def _pool(identity) -> LocalCPUBackend:
    size = identity.layout.chunk_bytes(identity.chunk_size)
    allocator = initialize_allocator(16 * size, chunk_bytes=size, huge_pages=False)
    return LocalCPUBackend(allocator, LRUPolicy(), metrics=Metrics())


def _write(identity, keys, disk_dir) -> None:
    """Store chunks, each filled with the first byte of its key, and end."""
    pool = _pool(identity)
    disk = make_disk(pool, disk_dir, identity=identity)
    group = identity.layout.groups[0]
    pages = identity.chunk_size // identity.layout.page_size
    shape = (group.num_layers, pages, group.layer_page_bytes)
    objs = pool.batched_allocate(shape, torch.uint8, len(keys), MemoryFormat.OPAQUE_PAGES)
    with References(objs):
        for key, obj in zip(keys, objs, strict=True):
            obj.array[:] = key[0]
        disk.batched_submit_put_task(keys, objs)
    disk.close()
    pool.close()


def _found(identity, keys, disk_dir) -> int:
    """How many chunks a worker of this identity finds after a restart; all bytes are checked."""
    pool = _pool(identity)
    disk = make_disk(pool, disk_dir, identity=identity)
    objs = disk.batched_get_blocking(keys)
    with References(objs):
        found = [(key, obj) for key, obj in zip(keys, objs, strict=True) if obj is not None]
        assert all((obj.array == key[0]).all() for key, obj in found)
    disk.close()
    assert pool.memcheck().num_objects == len(pool.keys())
    pool.close()
    return len(found)


@pytest.mark.parametrize("name", OTHERS)
def test_fault_9_another_worker_on_the_same_directory(
    name, engine_config, tiny_model_dir, tmp_path
):
    """Fault 9: found again by the same worker after a restart, by no other one."""
    folder, disk_dir = tmp_path / "model", tmp_path / "disk"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    identity, keys = _keys(folder, engine_config)
    _write(identity, keys, disk_dir)
    assert _found(*_keys(folder, engine_config), disk_dir) == len(keys) == 3
    change, values = OTHERS[name]
    if change is not None:
        change(folder)
    other, other_keys = _keys(folder, engine_config, **values)
    assert _found(other, other_keys, disk_dir) == 0
    _write(other, other_keys, disk_dir)
    assert _found(other, other_keys, disk_dir) == len(other_keys) >= 3
    assert _found(identity, keys, disk_dir) == 3
