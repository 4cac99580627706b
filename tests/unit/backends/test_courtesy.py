"""Background stores give way while the engine copies, for a limited time; loads do not."""

from __future__ import annotations

import threading

import pytest

from kvkeep.backends.io_pool import WriteThrottle
from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.memory.base import References
from kvkeep.metrics import Metrics
from kvkeep.storage.manager import StorageManager
from kvkeep.testing.chunks import fill, make_keys, make_pool, put, wait_until
from support.disk import FaultyIO, make_disk
from support.paged_engine import PagedEngine

WAIT_S = 20.0


def test_nobody_waits_while_nobody_is_busy():
    courtesy = WriteThrottle()
    assert courtesy.give_way(WAIT_S) == 0.0
    with courtesy.busy():
        assert courtesy.give_way(0.0) == 0.0
    assert courtesy.give_way(WAIT_S) == 0.0


def test_who_gives_way_goes_on_when_the_last_one_is_done():
    courtesy, went_on = WriteThrottle(), threading.Event()

    def work():
        courtesy.give_way(WAIT_S)
        went_on.set()

    with courtesy.busy():
        with courtesy.busy():
            thread = threading.Thread(target=work)
            thread.start()
        assert not went_on.wait(0.05)
    assert went_on.wait(WAIT_S)
    thread.join(WAIT_S)


def test_patience_ends():
    courtesy = WriteThrottle()
    with courtesy.busy():
        assert courtesy.give_way(0.02) >= 0.02


@pytest.fixture
def tier(tmp_path):
    pool, io = make_pool(), FaultyIO()
    disk = make_disk(pool, tmp_path, io=io)
    yield pool, disk, io
    disk.close()
    assert pool.memcheck().num_objects == len(pool)
    pool.close()


def test_a_disk_writes_when_the_copy_is_done(tier):
    pool, disk, io = tier
    keys = make_keys(3)
    with disk.make_way(), References(fill(pool, keys)) as held:
        disk.batched_submit_put_task(keys, held.objects)
        wait_until(lambda: disk._pool.longest_running_s() > 0)
        assert io.calls.get("write", 0) == 0
    assert disk.flush(WAIT_S)
    assert disk.known_run(keys) == 3


def test_a_copy_that_takes_for_ever_stops_no_store(tier):
    pool, disk, _ = tier
    keys = make_keys(2)
    with disk.make_way():
        put(disk, pool, keys)
    assert disk.known_run(keys) == 2


def test_loads_wait_for_no_copy(tier, monkeypatch):
    pool, disk, _ = tier
    keys = make_keys(3)
    put(disk, pool, keys)
    monkeypatch.setattr(WriteThrottle, "give_way", None)  # nothing that a load does may call it
    with disk.make_way(), References(disk.batched_get_blocking(keys)) as held:
        assert None not in held.objects


def test_the_manager_asks_all_tiers(tmp_path):
    pool = make_pool()
    disk = make_disk(pool, tmp_path)
    storage = StorageManager([pool, disk], allocator_backend=pool, metrics=Metrics())
    with storage.make_way():
        assert disk._courtesy.give_way(0.01) > 0
    assert disk._courtesy.give_way(0.01) == 0
    storage.close()


def test_what_is_known_needs_no_call_of_the_disk(tier):
    """Also of chunks that another process may have written meanwhile."""
    pool, disk, io = tier
    keys = make_keys(4)
    put(disk, pool, keys[:2])
    before = dict(io.calls)
    assert disk.known_run(keys) == 2
    assert disk.known_run(keys[2:]) == 0
    assert io.calls == before


def test_a_store_is_given_way_while_it_copies_and_no_longer(tmp_path, monkeypatch):
    """Also if it fails half-way. A layerwise one is, layer by layer, and not in between."""
    model = PagedEngine(num_pages=8)
    tokens, pages = list(range(32)), range(8)
    model.prefill(tokens, pages)
    given = {"kvcaches": model.caches, "slot_mapping": model.slots(pages, 32)}
    extra = {"chunk_size": 8, "cpu.size": "64KiB", "disk.path": str(tmp_path)}
    identity = CacheIdentity("m", "1", model.layout, chunk_size=8)
    connector, seen = PagedGPUConnector(model.layout), []

    def from_gpu(self, *args, **kwargs):
        seen.append(courtesy.give_way(0.01) > 0)
        raise RuntimeError("the device failed")

    with CacheManager.create(load_settings(env={}, extra=extra), identity, connector) as manager:
        courtesy = manager.storage.storage_backends["LocalDiskBackend"]._courtesy
        with monkeypatch.context() as patch:
            patch.setattr(PagedGPUConnector, "batched_from_gpu", from_gpu)
            assert manager.engine.store(tokens, **given).num_tokens == 0
        assert seen == [True]
        assert courtesy.give_way(0.01) == 0
        seen.clear()
        copy_layers = PagedGPUConnector.layerwise_from_gpu

        def layerwise_from_gpu(self, *args, **kwargs):
            for _ in copy_layers(self, *args, **kwargs):
                seen.append(courtesy.give_way(0.01) > 0)
                yield

        monkeypatch.setattr(PagedGPUConnector, "layerwise_from_gpu", layerwise_from_gpu)
        for number, _ in enumerate(manager.engine.store_layer(tokens, **given)):
            assert courtesy.give_way(0.01) == 0
            assert len(seen) == number
        assert seen == [True] * model.layout.num_layers
        assert manager.engine.lookup(tokens, pin=False) == 32
