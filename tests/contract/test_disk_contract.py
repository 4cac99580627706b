"""The backend contract, over the disk tier, with every policy."""

from __future__ import annotations

import pytest

from kvkeep.policy.names import POLICIES
from kvkeep.testing.backends import BackendContract
from kvkeep.testing.chunks import CAPACITY, CHUNK_BYTES
from support.disk import make_disk


class TestLocalDiskBackend(BackendContract):
    @pytest.fixture(params=sorted(POLICIES))
    def make_backend(self, request, tmp_path):
        # Stores that wait hold memory of the contract's small pool: a quarter of it at most.
        queue_bytes = CAPACITY * CHUNK_BYTES // 4
        return lambda pool: make_disk(pool, tmp_path, policy=request.param, queue_bytes=queue_bytes)
