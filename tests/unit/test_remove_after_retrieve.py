"""remove_after_retrieve: a chunk is gone once it was loaded, and not before."""

from __future__ import annotations

import pytest
import torch

from kvkeep.backends.reference import DictBackend
from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.errors import BackendError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.testing.chunks import wait_until
from support.engine_rig import EngineRig
from support.paged_engine import PagedEngine

TOKENS = list(range(1000, 1032))
PAGES = [9, 3, 60, 22, 1, 40, 17, 8]
LOWER = "lower"


class FailingConnector(PagedGPUConnector):
    """Fails to copy the chunk that starts at ``fail_chunk``, alone or with others."""

    fail_chunk: int | None = None

    def batched_to_gpu(self, memory_objs, starts, ends, **more):
        if self.fail_chunk in starts:
            raise RuntimeError("device lost")
        super().batched_to_gpu(memory_objs, starts, ends, **more)

    def _layer_jobs(self, transfer, layer):
        if self.fail_chunk is not None and transfer.to_engine and layer == 1:
            raise RuntimeError("device lost")
        return super()._layer_jobs(transfer, layer)


def bulk(rig: EngineRig, tokens=TOKENS, req_id=None) -> torch.Tensor:
    slots = rig.model.slots(PAGES, len(tokens))
    return rig.engine.retrieve(tokens, kvcaches=rig.model.caches, slot_mapping=slots, req_id=req_id)


def steps(rig: EngineRig, tokens=TOKENS, req_id=None):
    slots = rig.model.slots(PAGES, len(tokens))
    return rig.engine.retrieve_layer(
        tokens, kvcaches=rig.model.caches, slot_mapping=slots, req_id=req_id
    )


def layerwise(rig: EngineRig, tokens=TOKENS, req_id=None) -> torch.Tensor:
    return list(steps(rig, tokens, req_id))[-1]


both_ways = pytest.mark.parametrize("retrieve", [bulk, layerwise])


@both_ways
def test_a_chunk_that_was_loaded_is_gone_from_every_tier(retrieve) -> None:
    tiers = [lambda pool: DictBackend(pool, name=LOWER)]
    with EngineRig(tiers=tiers, remove_after_retrieve=True) as rig:
        rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        assert rig.engine.lookup(TOKENS, lookup_id="r", pin=True) == 32
        assert retrieve(rig, req_id="r").all()
        assert rig.model.right_pages(TOKENS, PAGES) == [True] * 8
        assert rig.cpu.keys() == [], "at once"
        wait_until(lambda: rig.storage.storage_backends[LOWER].keys() == [])
        assert rig.engine.lookup(TOKENS) == 0
        rig.fill(TOKENS, PAGES)
        assert rig.engine.lookup(TOKENS) == 32, "it can be stored again"


@both_ways
def test_only_what_was_loaded_goes(retrieve) -> None:
    with EngineRig(remove_after_retrieve=True) as rig:
        rig.fill(TOKENS, PAGES)
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        assert retrieve(rig, TOKENS[:16]).all()
        assert rig.cpu.keys() and set(rig.cpu.keys()) == set(keys[2:])


@both_ways
def test_a_load_that_fails_half_way_removes_what_it_loaded_alone(retrieve) -> None:
    with EngineRig(connector=FailingConnector, remove_after_retrieve=True) as rig:
        rig.fill(TOKENS, PAGES)
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        rig.connector.fail_chunk = 8
        assert int(retrieve(rig).sum()) == 8
        assert set(rig.cpu.keys()) == set(keys[1:])
        rig.connector.fail_chunk = 0
        assert not retrieve(rig).any()
        assert set(rig.cpu.keys()) == set(keys[1:]), "a load that failed removes nothing"


@pytest.mark.parametrize("num_steps", range(5))
def test_a_load_that_is_dropped_removes_nothing(num_steps) -> None:
    with EngineRig(remove_after_retrieve=True) as rig:
        rig.fill(TOKENS, PAGES)
        load = steps(rig)
        for _ in range(num_steps):
            next(load)
        load.close()
        assert rig.engine.lookup(TOKENS) == 32


@both_ways
def test_another_requests_lease_still_reads_it(retrieve) -> None:
    with EngineRig(remove_after_retrieve=True) as rig:
        rig.fill(TOKENS, PAGES)
        assert rig.engine.lookup(TOKENS, lookup_id="a", pin=True) == 32
        assert rig.engine.lookup(TOKENS, lookup_id="b", pin=True) == 32
        assert retrieve(rig, req_id="a").all()
        assert rig.cpu.keys() == []
        rig.fill(list(range(5000, 5032)), range(20, 28))  # nothing takes its memory meanwhile
        rig.model.wipe(PAGES)
        assert retrieve(rig, req_id="b").all()
        assert rig.model.right_pages(TOKENS, PAGES) == [True] * 8
        assert rig.engine.lookup(TOKENS) == 0


def test_without_the_setting_chunks_stay() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        assert bulk(rig).all()
        assert rig.engine.lookup(TOKENS) == 32


class FailingToRemove(DictBackend):
    """Cannot remove."""

    def batched_remove(self, keys):
        raise BackendError("down", backend=self.name, operation="remove")


def test_a_tier_that_cannot_remove_is_counted_and_the_load_goes_on() -> None:
    tiers = [lambda pool: FailingToRemove(pool, name=LOWER)]
    with EngineRig(tiers=tiers, remove_after_retrieve=True) as rig:
        rig.fill(TOKENS, PAGES)
        assert bulk(rig).all()
        assert rig.cpu.keys() == []
        failed = f'kvkeep_failures_total{{tier="{LOWER}",operation="remove",cause="BackendError"}}'
        wait_until(lambda: rig.metrics.snapshot().get(failed) == 1)
        rig.storage.storage_backends[LOWER].clear()


def test_it_is_a_setting(tmp_path) -> None:
    model = PagedEngine(num_pages=16)
    identity = CacheIdentity("m", "1", model.layout, chunk_size=8)
    settings = load_settings(
        extra={
            "chunk_size": 8,
            "cpu.size": "1MiB",
            "cpu.buffers": "0B",
            "cpu.prefault": "0B",
            "disk.path": str(tmp_path),
            "remove_after_retrieve": True,
        }
    )
    with CacheManager.create(settings, identity, PagedGPUConnector(model.layout)) as manager:
        model.prefill(TOKENS, range(8))
        slots = model.slots(range(8), 32)
        manager.engine.store(TOKENS, kvcaches=model.caches, slot_mapping=slots)
        assert manager.engine.retrieve(TOKENS, kvcaches=model.caches, slot_mapping=slots).all()
        disk = manager.storage.storage_backends["LocalDiskBackend"]
        wait_until(lambda: manager.engine.lookup(TOKENS) == 0 and disk.keys() == [])
    with CacheManager.create(settings, identity, PagedGPUConnector(model.layout)) as manager:
        assert manager.engine.lookup(TOKENS) == 0, "also after a restart"
