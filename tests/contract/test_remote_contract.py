"""The backend contract, over the remote tier and real stores."""

from __future__ import annotations

import pytest

from kvkeep.testing.backends import BackendContract
from kvkeep.testing.remote import make_remote


class TestRemoteBackendOverADirectory(BackendContract):
    @pytest.fixture
    def make_backend(self, tmp_path):
        return lambda pool: make_remote(pool, f"file://{tmp_path}")
