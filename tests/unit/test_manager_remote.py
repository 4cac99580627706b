"""The remote tier under a whole engine: two machines in turn, settings, stores that are wrong."""

from __future__ import annotations

import sys

import pytest

from kvkeep.backends.remote.backend import RemoteBackend
from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.errors import ConfigError, MissingExtraError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.testing.chunks import wait_until
from support.paged_engine import PagedEngine
from support.servers.redis import redis_server

CPU, DISK, REMOTE = "LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"
PAGES = range(8)
TOKENS = list(range(2000, 2030))  # three full chunks of 8, and 6 tokens more


def build(model, url, **extra):
    values = {"chunk_size": 8, "cpu.size": "64KiB", "remote.url": url, "lookup.timeout": "20s"}
    settings = load_settings(env={}, extra={**values, **extra})
    identity = CacheIdentity("m", "1", model.layout, chunk_size=8)
    return CacheManager.create(settings, identity, PagedGPUConnector(model.layout))


def store(manager, model):
    model.prefill(TOKENS, PAGES)
    slots = model.slots(PAGES, len(TOKENS))
    result = manager.engine.store(TOKENS, kvcaches=model.caches, slot_mapping=slots)
    assert manager.storage.storage_backends[REMOTE].flush(20)
    return result.num_tokens


def load(manager, model):
    """Tokens loaded after a lookup; every loaded page is the right one."""
    model.wipe(PAGES)
    found = manager.engine.lookup(TOKENS, lookup_id="r", pin=True)
    mask = manager.engine.retrieve(
        TOKENS,
        kvcaches=model.caches,
        slot_mapping=model.slots(PAGES, len(TOKENS)),
        req_id="r",
    )
    loaded = int(mask.sum())
    assert loaded == found
    full = loaded // 4
    assert model.right_pages(TOKENS, PAGES)[:full] == [True] * full
    return loaded


@pytest.fixture
def model():
    return PagedEngine(num_pages=8)


@pytest.fixture(params=["file", "redis"])
def url(request, tmp_path):
    if request.param == "file":
        yield f"file://{tmp_path}"
        return
    with redis_server() as server:
        yield server.url


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_prompt_is_found_by_another_engine(model, url, codec):
    """Through the store alone, with the same bytes; then from memory."""
    with build(model, url, **{"remote.codec": codec}) as manager:
        assert list(manager.storage.storage_backends) == [CPU, REMOTE]
        assert store(manager, model) == 24
    with build(model, url) as manager:
        assert load(manager, model) == 24
        assert load(manager, model) == 24
        values = manager.metrics.snapshot()
        assert values[f'kvkeep_lookup_hit_tokens_total{{tier="{REMOTE}"}}'] == 24
        assert values[f'kvkeep_lookup_hit_tokens_total{{tier="{CPU}"}}'] == 24
        report = manager.engine.check()
        assert (report.open_leases, report.num_objects) == (0, report.num_chunks)


def test_the_tail_that_fills_no_chunk(model, tmp_path):
    """It is stored and found, too, where the settings say so."""
    url = f"file://{tmp_path}"
    tokens = 30 // 4 * 4  # what pages hold in whole
    with build(model, url, save_unfull_chunk=True) as manager:
        stored = store(manager, model)
        assert stored >= tokens
    with build(model, url, save_unfull_chunk=True) as manager:
        assert load(manager, model) == stored


def test_disk_and_remote_together(model, tmp_path):
    """Both are written; a lost disk is made up for by the store, and the other way round."""
    for name in ("disk", "shared"):
        (tmp_path / name).mkdir()
    url, disk = f"file://{tmp_path / 'shared'}", {"disk.path": str(tmp_path / "disk")}
    with build(model, url, **disk) as manager:
        assert list(manager.storage.storage_backends) == [CPU, DISK, REMOTE]
        assert store(manager, model) == 24
    with build(model, url, **disk) as manager:
        manager.storage.clear([DISK])
        assert load(manager, model) == 24
    with build(model, url, **disk) as manager:
        manager.engine.clear()
        assert store(manager, model) == 24
        assert manager.storage.storage_backends[DISK].flush(20)
        manager.storage.clear([REMOTE])
        manager.storage.clear([CPU])
        assert load(manager, model) == 24


def test_a_lossy_codec_has_chunks_of_its_own(model, tmp_path):
    """Fault 9: nobody without it finds them, also not in memory."""
    url = f"file://{tmp_path}"
    with build(model, url) as manager:
        assert store(manager, model) == 24
    with pytest.raises(ConfigError, match="fp8"):
        build(model, url, **{"remote.codec": "fp8"})  # opaque bytes of an unknown element type


def test_a_store_that_is_away_at_the_start(model, tmp_path):
    """No error: the engine works without it, and with it as soon as it is there."""
    with build(model, f"file://{tmp_path}/later", **{"health.interval": "50ms"}) as manager:
        wait_until(lambda: not manager.engine.health().backends[REMOTE].healthy)
        assert store(manager, model) == 24
        assert load(manager, model) == 24
        (tmp_path / "later").mkdir()
        wait_until(lambda: REMOTE not in manager.storage.bypassed)
        wait_until(lambda: manager.engine.health().backends[REMOTE].healthy)
        manager.storage.clear([CPU])
        store(manager, model)
        manager.storage.clear([CPU])
        assert load(manager, model) == 24


def test_settings_of_the_remote_tier(model, tmp_path):
    """Fault 46: they reach the tier; stores may hold a quarter of the pool at most."""
    given = {
        "remote.threads": 3,
        "remote.load_timeout": "3s",
        "remote.store_timeout": "4s",
        "remote.connect_timeout": "500ms",
        "remote.lookup_share": 0.5,
    }
    with build(model, f"file://{tmp_path}", **given) as manager:
        remote = manager.storage.storage_backends[REMOTE]
        assert isinstance(remote, RemoteBackend)
        options = remote._options
        assert (options.threads, options.load_timeout_s, options.store_timeout_s) == (3, 3.0, 4.0)
        assert (options.lookup_timeout_s, options.probe_timeout_s) == (10.0, 1.0)
        assert 15 << 10 < options.queue_bytes <= 16 << 10
    with build(model, f"file://{tmp_path}", **{"remote.queue": "5KiB"}) as manager:
        assert manager.storage.storage_backends[REMOTE]._options.queue_bytes == 5 << 10


def test_urls_that_are_wrong_end_the_start_without_the_secret(model):
    """Fault 48: and everything that was built is closed again."""
    with pytest.raises(ConfigError, match="no option decode") as caught:
        build(model, "redis://me:hush@host?decode=yes")
    assert "hush" not in str(caught.value)


def test_a_library_that_is_missing_is_named(model, monkeypatch):
    for name in list(sys.modules):
        if name == "redis" or name.startswith(("redis.", "kvkeep.backends.remote.redis")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"kvkeep\[redis\]"):
        build(model, "redis://host")
