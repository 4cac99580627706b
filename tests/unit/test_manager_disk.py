"""The disk tier under a whole engine: restart, a CPU tier that is too small, settings."""

from __future__ import annotations

import os
import signal

import pytest

from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.errors import ConfigError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.testing.chunks import wait_until
from support.disk import chunk_files, file_bytes
from support.paged_engine import PagedEngine

DISK = "LocalDiskBackend"
CPU = "LocalCPUBackend"
PAGES = range(8)
TOKENS = list(range(2000, 2032))
OTHER = list(range(5000, 5032))


def build(model, path, *, cpu_size="64KiB", **extra):
    settings = load_settings(
        env={}, extra={"chunk_size": 8, "cpu.size": cpu_size, "disk.path": str(path), **extra}
    )
    identity = CacheIdentity("m", "1", model.layout, chunk_size=8)
    return CacheManager.create(settings, identity, PagedGPUConnector(model.layout))


def store(manager, model, tokens):
    model.prefill(tokens, PAGES)
    slots = model.slots(PAGES, len(tokens))
    assert manager.engine.store(tokens, kvcaches=model.caches, slot_mapping=slots).num_tokens == 32
    disk = manager.storage.storage_backends[DISK]
    assert disk.flush(20)


def load(manager, model, tokens, *, lookup_id=None):
    """Tokens found by a lookup and tokens loaded; every loaded page is the right one."""
    model.wipe(PAGES)
    found = manager.engine.lookup(tokens, lookup_id=lookup_id, pin=lookup_id is not None)
    mask = manager.engine.retrieve(
        tokens,
        kvcaches=model.caches,
        slot_mapping=model.slots(PAGES, len(tokens)),
        req_id=lookup_id,
    )
    loaded = int(mask.sum())
    assert model.right_pages(tokens, PAGES) == [page * 4 < loaded for page in PAGES]
    return found, loaded


@pytest.fixture
def model():
    return PagedEngine(num_pages=8)


@pytest.mark.parametrize("lookup_id", [None, "request"])
def test_a_prompt_is_found_after_a_restart(model, tmp_path, lookup_id):
    """Fault 37: by the engine, with the same bytes, with and without a lease."""
    with build(model, tmp_path) as manager:
        assert list(manager.storage.storage_backends) == [CPU, DISK]
        store(manager, model, TOKENS)
    with build(model, tmp_path) as manager:
        assert load(manager, model, TOKENS, lookup_id=lookup_id) == (32, 32)
        hits = manager.metrics.snapshot()
        assert hits[f'kvkeep_lookup_hit_tokens_total{{tier="{DISK}"}}'] == 32
        assert manager.storage.storage_backends[CPU].keys(), "promoted"
        assert load(manager, model, TOKENS, lookup_id=lookup_id) == (32, 32)
        hits = manager.metrics.snapshot()
        assert hits[f'kvkeep_lookup_hit_tokens_total{{tier="{CPU}"}}'] == 32
        report = manager.engine.check()
        assert report.open_leases == 0
        assert report.num_objects == report.num_chunks == 4


def test_a_working_set_larger_than_the_cpu_tier(model, tmp_path):
    """Chunks travel between the tiers; the prefix may be split over both, in any order."""
    with build(model, tmp_path, cpu_size="8KiB") as manager:
        cpu = manager.storage.storage_backends[CPU]
        for turn in range(3):
            for start in range(0, 80_000, 8_000):
                tokens = list(range(start, start + 32))
                if turn == 0:
                    store(manager, model, tokens)
                lookup_id = f"{turn} {start}" if start % 16_000 else None
                assert load(manager, model, tokens, lookup_id=lookup_id) == (32, 32)
        assert len(cpu.keys()) <= 21
        assert len(manager.storage.storage_backends[DISK].keys()) == 40
        keys = [key for _, _, key in manager.engine.token_database.process_tokens(TOKENS)]
        store(manager, model, TOKENS)
        cpu.clear()
        got = manager.storage.batched_get([keys[0], keys[2]], DISK)
        for obj in got:
            obj.ref_count_down()
        assert manager.storage.remove(keys[2], [DISK]) == 1
        runs = manager.storage.get_block_mapping(keys)
        assert [run.location for run in runs] == [CPU, DISK, CPU, DISK]
        assert load(manager, model, TOKENS, lookup_id="split") == (32, 32)
        assert manager.engine.check().open_leases == 0


def test_a_restart_with_another_model_in_the_directory(model, tmp_path):
    with build(model, tmp_path) as manager:
        store(manager, model, TOKENS)
    settings = load_settings(env={}, extra={"chunk_size": 8, "disk.path": str(tmp_path)})
    other = CacheIdentity("m", "2", model.layout, chunk_size=8)
    connector = PagedGPUConnector(model.layout)
    with CacheManager.create(settings, other, connector) as manager:
        assert load(manager, model, TOKENS) == (0, 0)
        assert manager.engine.clear() == 0
    with build(model, tmp_path) as manager:
        assert load(manager, model, TOKENS) == (32, 32)


def test_clear_and_the_budget(model, tmp_path):
    size = 4096 * 5
    with build(model, tmp_path, **{"disk.size": f"{size}B"}) as manager:
        store(manager, model, TOKENS)
        store(manager, model, OTHER)
        assert file_bytes(tmp_path) <= size
        assert len(chunk_files(tmp_path)) == 4
        assert manager.engine.clear([DISK]) == 4
        assert chunk_files(tmp_path) == []


def test_a_directory_that_cannot_be_made(model, tmp_path):
    """Fault 39: the engine works without its disk, and finds it once it is there."""
    (tmp_path / "file").write_bytes(b"")
    with build(model, tmp_path / "file") as manager:
        model.prefill(TOKENS, PAGES)
        slots = model.slots(PAGES, 32)
        manager.engine.store(TOKENS, kvcaches=model.caches, slot_mapping=slots)
        assert load(manager, model, TOKENS) == (32, 32)
        disk = manager.storage.storage_backends[DISK]
        assert not disk.health().healthy
        (tmp_path / "file").unlink()
        wait_until(lambda: disk.health().healthy)
        assert (tmp_path / "file" / ROOT_NAME / "ledger").exists()


def test_settings_of_the_disk(model, tmp_path):
    extra = {"disk.policy": "FIFO", "disk.threads": 3, "disk.queue": "1GiB", "lookup.timeout": "2s"}
    with build(model, tmp_path, **extra) as manager:
        disk = manager.storage.storage_backends[DISK]
        assert type(disk._index._policy).__name__ == "FIFOPolicy"
        assert len(disk._pool._threads) == 3
        assert disk._options.queue_bytes <= (64 << 10) // 4
        assert disk._options.lookup_timeout_s == pytest.approx(1.4)


def test_a_setting_without_a_path():
    """Fault 46: it would have no effect, so it is an error."""
    with pytest.raises(ConfigError, match=r"disk\.size has no effect without disk\.path"):
        load_settings(env={}, extra={"disk.size": "1GiB"})


def test_a_forked_process_ends_nothing_of_the_cache(model, tmp_path):
    """It has none of the threads that would write what waits for the disk."""
    model.prefill(OTHER, PAGES)
    slots = model.slots(PAGES, len(OTHER))
    with build(model, tmp_path) as manager:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(10)  # the disk tier would wait for longer
                manager.engine.store(OTHER, kvcaches=model.caches, slot_mapping=slots)
                manager.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        store(manager, model, TOKENS)
        assert load(manager, model, TOKENS) == (32, 32)
