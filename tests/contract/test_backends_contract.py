"""The backend contract, over every backend."""

from __future__ import annotations

import pytest

from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.backends.reference import DictBackend
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.names import POLICIES, create_policy
from kvkeep.testing.backends import BackendContract
from kvkeep.testing.chunks import CAPACITY, CHUNK_BYTES
from kvkeep.testing.faulty import FaultyAllocatorBackend, FaultyBackend


class TestLocalCPUBackend(BackendContract):
    @pytest.fixture(params=sorted(POLICIES))
    def pool(self, request):
        allocator = initialize_allocator(CAPACITY * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
        pool = LocalCPUBackend(allocator, create_policy(request.param), metrics=Metrics())
        yield pool
        pool.close()

    @pytest.fixture
    def make_backend(self):
        return lambda pool: pool


class TestLocalCPUBackendOverAGeneralAllocator(BackendContract):
    @pytest.fixture
    def pool(self):
        allocator = initialize_allocator(CAPACITY * CHUNK_BYTES, chunk_bytes=None)
        pool = LocalCPUBackend(allocator, create_policy("LRU"), metrics=Metrics())
        yield pool
        pool.close()

    @pytest.fixture
    def make_backend(self):
        return lambda pool: pool


class TestDictBackend(BackendContract):
    @pytest.fixture
    def make_backend(self):
        return DictBackend


class TestFaultyBackendWithoutFaults(BackendContract):
    @pytest.fixture
    def make_backend(self):
        return lambda pool: FaultyBackend(DictBackend(pool))


class TestFaultyAllocatorBackendWithoutFaults(BackendContract):
    @pytest.fixture
    def make_backend(self):
        return FaultyAllocatorBackend
