"""The backend contract, over the remote tier and a real S3-compatible server."""

from __future__ import annotations

import pytest

from kvkeep.testing.backends import BackendContract
from kvkeep.testing.remote import make_remote
from kvkeep.testing.servers.s3 import s3_server


@pytest.fixture(scope="module")
def server():
    with s3_server() as server:
        yield server


class TestRemoteBackendOverS3(BackendContract):
    @pytest.fixture
    def make_backend(self, server):
        for path in server.objects():
            path.unlink()
        return lambda pool: make_remote(pool, server.url())
