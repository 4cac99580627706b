"""The contract of connectors to remote stores, over real stores."""

from __future__ import annotations

import pytest

from kvkeep.backends.remote import create_connector
from kvkeep.config.base import RemoteURL
from kvkeep.testing.remote_stores import OPTIONS, ConnectorContract
from support.servers.certificates import make_certificates
from support.servers.redis import (
    RedisOptions,
    redis_cluster,
    redis_sentinel,
    redis_server,
)


def connect(url):
    return create_connector(RemoteURL.parse(url), OPTIONS)


@pytest.fixture(scope="module")
def server():
    with redis_server(RedisOptions(password="s3cret/@:")) as server:
        yield server


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory):
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    with redis_server(RedisOptions(certificates=certificates)) as server:
        yield server


@pytest.fixture(scope="module")
def cluster():
    with redis_cluster() as servers:
        yield servers


@pytest.fixture(scope="module")
def watched():
    with redis_sentinel() as watched:
        yield watched


class TestDirectory(ConnectorContract):
    @pytest.fixture
    def connector(self, tmp_path):
        return connect(f"file://{tmp_path}")


class TestRedisWithAPassword(ConnectorContract):
    @pytest.fixture
    def connector(self, server):
        return connect(f"redis://:s3cret%2F%40%3A@127.0.0.1:{server.port}/2")


class TestRedisOverAUnixSocket(ConnectorContract):
    @pytest.fixture
    def connector(self, server):
        return connect(f"unix://:s3cret%2F%40%3A@{server.unix_socket}?db=1")


class TestRedisOverTLS(ConnectorContract):
    @pytest.fixture
    def connector(self, tls_server):
        authority = tls_server.options.certificates.authority
        return connect(f"valkeys://localhost:{tls_server.port}?ssl_ca_certs={authority}")


class TestRedisCluster(ConnectorContract):
    @pytest.fixture
    def connector(self, cluster):
        return connect(f"redis-cluster://127.0.0.1:{cluster[0].port}")


class TestRedisBehindASentinel(ConnectorContract):
    @pytest.fixture
    def connector(self, watched):
        return connect(watched.url)
