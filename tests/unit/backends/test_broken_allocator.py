"""Slow tiers whose memory comes from something broken answer all the same."""

from __future__ import annotations

import pytest

from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.metrics import Metrics
from kvkeep.testing.chunks import check_found, make_keys, make_pool, put
from support.disk import make_disk
from support.remote import make_remote

WAIT_S = 20.0
KEYS = make_keys(4)


@pytest.fixture(params=["disk", "remote"])
def tier(request, tmp_path):
    pool, metrics = make_pool(), Metrics()
    if request.param == "disk":
        backend = make_disk(pool, tmp_path, metrics=metrics)
    else:
        backend = make_remote(pool, f"file://{tmp_path}", metrics=metrics)
    yield backend, pool, metrics
    backend.close()
    pool.clear()
    assert pool.memcheck().num_objects == 0
    pool.close()


def test_a_load_in_the_background_for_which_there_is_no_memory_ends(tier, monkeypatch):
    """Whoever waits for it is answered: everything is a miss, and counted."""
    backend, pool, metrics = tier
    put(backend, pool, KEYS)
    pool.clear()

    def broken(*_, **__):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(LocalCPUBackend, "batched_allocate", broken)
        found = backend.batched_get_non_blocking(KEYS).result(WAIT_S)
    assert found == [None] * 4
    counted = [
        value
        for name, value in metrics.snapshot().items()
        if name.startswith("kvkeep_failures_total") and 'cause="internal"' in name
    ]
    assert counted == [1]
    found = backend.batched_get_non_blocking(KEYS).result(WAIT_S)
    assert check_found(KEYS, found) == [True] * 4
