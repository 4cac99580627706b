"""The allocator contract, over every allocator."""

from __future__ import annotations

import mmap
import uuid

import pytest

from kvkeep.memory.allocators import GeneralAllocator, PagedAllocator
from kvkeep.memory.arena import Arena
from kvkeep.memory.factory import initialize_allocator
from kvkeep.testing.allocators import CAPACITY, OBJECT_BYTES, AllocatorContract

POOL_BYTES = CAPACITY * OBJECT_BYTES


class TestPagedAllocator(AllocatorContract):
    @pytest.fixture
    def make_allocator(self):
        return lambda: PagedAllocator(Arena(POOL_BYTES), OBJECT_BYTES)


class TestPagedAllocatorInPartOfAnArena(AllocatorContract):
    @pytest.fixture
    def make_allocator(self):
        return lambda: PagedAllocator(
            Arena(POOL_BYTES + 8192), OBJECT_BYTES - 1, offset=4096, size_bytes=POOL_BYTES + 100
        )


class TestGeneralAllocator(AllocatorContract):
    @pytest.fixture
    def make_allocator(self):
        return lambda: GeneralAllocator(Arena(POOL_BYTES))


class TestGeneralAllocatorInPartOfAnArena(AllocatorContract):
    @pytest.fixture
    def make_allocator(self):
        return lambda: GeneralAllocator(
            Arena(POOL_BYTES + 8192), align=1024, offset=64, size_bytes=POOL_BYTES + 100
        )


class TestMixedMemoryAllocator(AllocatorContract):
    @pytest.fixture
    def make_allocator(self):
        return lambda: initialize_allocator(
            POOL_BYTES + 1000, chunk_bytes=OBJECT_BYTES, buffer_bytes=1000
        )


class TestSharedMemory(AllocatorContract):
    @pytest.fixture
    def make_allocator(self):
        name = f"contract-{uuid.uuid4().hex}"
        return lambda: initialize_allocator(POOL_BYTES, chunk_bytes=OBJECT_BYTES, shared_name=name)


class TestPagedCpuGpuMemoryAllocator(AllocatorContract):
    @pytest.fixture
    def make_allocator(self):
        return lambda: initialize_allocator(
            CAPACITY * mmap.PAGESIZE, chunk_bytes=OBJECT_BYTES, is_registrable=True
        )
