"""The backend contract, over the disk tier, with every policy."""

from __future__ import annotations

import pytest

from kvkeep.policy.names import POLICIES
from kvkeep.testing.backends import BackendContract
from kvkeep.testing.disk import make_disk


class TestLocalDiskBackend(BackendContract):
    @pytest.fixture(params=sorted(POLICIES))
    def make_backend(self, request, tmp_path):
        return lambda pool: make_disk(pool, tmp_path, policy=request.param)
