"""The backend contract, over the remote tier and real stores."""

from __future__ import annotations

import pytest

from kvkeep.testing.backends import BackendContract
from support.remote import make_remote
from support.servers.redis import redis_cluster, redis_server


@pytest.fixture(scope="module")
def server():
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def cluster():
    with redis_cluster() as servers:
        yield servers


class TestRemoteBackendOverADirectory(BackendContract):
    @pytest.fixture
    def make_backend(self, tmp_path):
        return lambda pool: make_remote(pool, f"file://{tmp_path}")


class TestRemoteBackendWithACodec(BackendContract):
    @pytest.fixture
    def make_backend(self, tmp_path):
        return lambda pool: make_remote(pool, f"file://{tmp_path}", codec="zstd")


class TestRemoteBackendOverRedis(BackendContract):
    @pytest.fixture
    def make_backend(self, server):
        server.command("FLUSHALL")
        return lambda pool: make_remote(pool, server.url)


class TestRemoteBackendOverARedisCluster(BackendContract):
    @pytest.fixture
    def make_backend(self, cluster):
        for server in cluster:
            server.command("FLUSHALL")
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in cluster)
        return lambda pool: make_remote(pool, f"redis-cluster://{hosts}")
