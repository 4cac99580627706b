"""No metric moves while the engine is idle, whatever goes on beside it: checks, scrapes, timers."""

from __future__ import annotations

import threading
import urllib.request

import torch

from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.testing.chunks import wait_until
from support.paged_engine import PagedEngine

TOKENS = list(range(64))
NUM_CHECKS = 20
LONG_S = 30.0


def test_nothing_moves_in_an_idle_engine_with_all_that_runs_beside_it(tmp_path, monkeypatch):
    """Fault 47: counters grew while nothing happened."""
    model = PagedEngine(num_pages=32, num_layers=2)
    (tmp_path / "remote").mkdir()
    settings = load_settings(
        extra={
            "chunk_size": 8,
            "cpu.size": "8MiB",
            "cpu.prefault": "4MiB",
            "disk.path": str(tmp_path / "disk"),
            "remote.url": f"file://{tmp_path / 'remote'}",
            "metrics.listen": "127.0.0.1:0",
            "health.interval": "1ms",
        }
    )
    places = []
    monkeypatch.setattr(
        "kvkeep.engine.build._log.info", lambda text, *args: places.append(args[-1]), raising=True
    )
    connector = PagedGPUConnector(model.layout)
    connector.register_kv_caches(model.caches)
    identity = CacheIdentity("idle", "1", model.layout, chunk_size=8)
    with CacheManager.create(settings, identity, connector) as manager:
        engine = manager.engine
        model.prefill(TOKENS, range(16))
        where = {"kvcaches": None, "slot_mapping": torch.arange(64)}
        engine.store(TOKENS, **where)
        engine.lookup(TOKENS, lookup_id="a", pin=True)
        engine.retrieve(TOKENS, req_id="a", **where)
        engine.lookup([5] * 64)
        for tier in list(manager.storage.storage_backends.values())[1:]:
            assert tier.flush(LONG_S)
        wait_until(lambda: all(tier.healthy for tier in engine.health().backends.values()))
        done = threading.Semaphore(0)
        check = manager.storage.backend_health

        def counted(name: str) -> object:
            done.release()
            return check(name)

        monkeypatch.setattr(
            type(manager.storage), "backend_health", lambda self, name: counted(name)
        )
        before = manager.metrics.snapshot()
        for _ in range(NUM_CHECKS):
            assert done.acquire(timeout=LONG_S)
            host, port = places[0]
            url = f"http://{host}:{port}/metrics"
            with urllib.request.urlopen(url, timeout=LONG_S) as answer:
                assert b"kvkeep_lookup_tokens_total 128.0" in answer.read()
        engine.health()
        engine.check()
        assert manager.metrics.snapshot() == before
