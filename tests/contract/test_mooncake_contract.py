"""The contracts of connectors and backends, over a real Mooncake Store."""

from __future__ import annotations

import pytest

from kvkeep.backends.remote.names import create_connector
from kvkeep.config.store_url import RemoteURL
from kvkeep.testing.backends import BackendContract
from kvkeep.testing.remote import make_remote
from kvkeep.testing.servers.mooncake import mooncake_pool
from kvkeep.testing.stores import OPTIONS, ConnectorContract

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="module")
def server():
    with mooncake_pool() as server:
        yield server


class TestMooncake(ConnectorContract):
    @pytest.fixture
    def connector(self, server):
        return create_connector(RemoteURL.parse(server.url()), OPTIONS)


class TestRemoteBackendOverMooncake(BackendContract):
    @pytest.fixture
    def make_backend(self, server):
        return lambda pool: make_remote(pool, server.url())
