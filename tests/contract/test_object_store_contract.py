"""The contracts of connectors and backends, over a real S3-compatible server."""

from __future__ import annotations

import pytest

from kvkeep.backends.remote import create_connector
from kvkeep.config.base import RemoteURL
from kvkeep.testing.backends import BackendContract
from kvkeep.testing.remote_stores import OPTIONS, ConnectorContract
from support.remote import make_remote
from support.servers.s3 import s3_server


@pytest.fixture(scope="module")
def server():
    with s3_server() as server:
        yield server


class TestS3(ConnectorContract):
    @pytest.fixture
    def connector(self, server):
        return create_connector(RemoteURL.parse(server.url()), OPTIONS)


class TestRemoteBackendOverS3(BackendContract):
    @pytest.fixture
    def make_backend(self, server):
        for path in server.objects():
            path.unlink()
        return lambda pool: make_remote(pool, server.url())
