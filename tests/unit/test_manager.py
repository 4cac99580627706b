from __future__ import annotations

import pytest

from kvkeep.backends.reference import DictBackend
from kvkeep.config import load_settings
from kvkeep.engine.build import DEFAULT_POOL_BYTES, CacheManager, default_pool_bytes
from kvkeep.errors import ConfigError, LayoutError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from support.paged_engine import PagedEngine

TOKENS = list(range(1000, 1027))


def build(model: PagedEngine, *, chunk_size: int = 8, extra: dict | None = None, **more):
    settings = load_settings(env={}, extra={"chunk_size": 8, "cpu.size": "64KiB", **(extra or {})})
    identity = CacheIdentity("m", "1", model.layout, chunk_size=chunk_size)
    return CacheManager.create(settings, identity, PagedGPUConnector(model.layout), **more)


def test_it_builds_a_working_engine_from_settings() -> None:
    model = PagedEngine(num_pages=16)
    slots = model.slots(range(7), 27)
    with build(model) as manager:
        model.prefill(TOKENS, range(7))
        result = manager.engine.store(TOKENS, kvcaches=model.caches, slot_mapping=slots)
        assert result.num_tokens == 24
        model.wipe(range(16))
        mask = manager.engine.retrieve(TOKENS, kvcaches=model.caches, slot_mapping=slots)
        assert int(mask.sum()) == 24
        assert model.right_pages(TOKENS, range(7)) == [True] * 6 + [False]
        report = manager.engine.check()
        assert 64 * 1024 - report.capacity_bytes < 384
        assert report.open_leases == 0
        assert report.num_objects == report.num_chunks == 3
        assert manager.metrics.snapshot()["kvkeep_stored_tokens_total"] == 24


def test_settings_have_an_effect() -> None:
    model = PagedEngine(num_pages=16)
    slots = model.slots(range(7), 27)
    extra = {"save_unfull_chunk": True, "cpu.policy": "FIFO", "lookup.lease": "1234s"}
    with build(model, extra=extra) as manager:
        model.prefill(TOKENS, range(7))
        result = manager.engine.store(TOKENS, kvcaches=model.caches, slot_mapping=slots)
        assert result.num_tokens == 27
        assert type(manager.storage.allocator_backend._policy).__name__ == "FIFOPolicy"
        assert manager.storage.leases.timeout_s == 1234
        assert manager.engine.check().num_chunks == 4


def test_further_tiers_stand_behind_the_cpu_tier() -> None:
    model = PagedEngine(num_pages=16)
    with build(model, extra_backends=[DictBackend]) as manager:
        assert list(manager.storage.storage_backends) == ["LocalCPUBackend", "DictBackend"]


def test_what_does_not_fit_together_is_refused_and_closed() -> None:
    model = PagedEngine(num_pages=16)
    with pytest.raises(ConfigError, match="chunk_size is 8 in the settings and 16"):
        build(model, chunk_size=16)
    with pytest.raises(LayoutError, match="multiple of the engine's page"):
        build(model, chunk_size=6, extra={"chunk_size": 6})
    closed = []

    class Broken(DictBackend):
        def close(self) -> None:
            closed.append(self.name)

    def fails(allocator_backend):
        raise RuntimeError("no such tier")

    with pytest.raises(RuntimeError, match="no such tier"):
        build(model, extra_backends=[Broken, fails])
    assert closed == ["DictBackend"]


def test_close_twice() -> None:
    manager = build(PagedEngine(num_pages=16))
    manager.close()
    manager.close()
    assert not manager.engine.is_healthy()


def test_the_default_pool_is_half_of_what_is_free_at_most() -> None:
    assert 0 < default_pool_bytes() <= DEFAULT_POOL_BYTES
