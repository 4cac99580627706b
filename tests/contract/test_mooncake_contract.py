"""The contracts of connectors and backends, over a real Mooncake Store."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.calls import ConcurrencyLimit, DetachedCalls
from kvkeep.config.base import RemoteURL
from kvkeep.memory.base import References
from kvkeep.testing.backends import BackendContract
from kvkeep.testing.chunks import make_keys, make_pool, put
from kvkeep.testing.remote_stores import OPTIONS, WAIT_S, ConnectorContract
from support.remote import make_remote
from support.servers.mooncake import mooncake_pool

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="module")
def server():
    with mooncake_pool() as server:
        yield server


class TestMooncake(ConnectorContract):
    @pytest.fixture
    def connector(self, server):
        return create_connector(RemoteURL.parse(server.url()), OPTIONS)


def test_payloads_take_turns(server, monkeypatch):
    """Calls that move payloads spin, so no more of them than turns are under way."""
    under_way, most, lock = set(), [], threading.Lock()
    call = DetachedCalls.call

    def counted(calls, run, deadline, keep=tuple):
        if keep is not tuple:
            with lock:
                under_way.add(run)
                most.append(len(under_way))
        try:
            return call(calls, run, deadline, keep)
        finally:
            with lock:
                under_way.discard(run)

    monkeypatch.setattr(DetachedCalls, "call", counted)
    with closing(make_pool(16)) as pool, closing(make_remote(pool, server.url())) as remote:
        remote._connector._turns = ConcurrencyLimit(1, patience_s=WAIT_S)
        keys = make_keys(8)
        put(remote, pool, keys)
        pool.clear()
        with References(remote.batched_get_blocking(keys)) as found:
            assert len(found.objects) == 8
        assert remote.batched_remove(keys) == 8
    assert len(most) >= 2
    assert max(most) == 1


class TestRemoteBackendOverMooncake(BackendContract):
    @pytest.fixture
    def make_backend(self, server):
        return lambda pool: make_remote(pool, server.url())
