"""MixedMemoryAllocator and the factory: which pool, whose bytes, who is woken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvkeep.layout import MemoryFormat
from kvkeep.memory.allocators import (
    GeneralAllocator,
    MixedMemoryAllocator,
    PagedAllocator,
    ReleaseSignal,
)
from kvkeep.memory.arena import Arena
from kvkeep.memory.factory import initialize_allocator

U8 = torch.uint8


def test_buffers_and_tensors_come_from_their_own_pools():
    allocator = initialize_allocator(10 * 1024 + 4096, chunk_bytes=1024, buffer_bytes=4096)
    assert isinstance(allocator, MixedMemoryAllocator)
    tensors = allocator.batched_allocate((1024,), U8, 10, MemoryFormat.OPAQUE_PAGES)
    assert allocator.allocate((8,), U8, MemoryFormat.OPAQUE_PAGES) is None
    buffer = allocator.allocate((4096,), U8, MemoryFormat.BINARY)
    assert buffer.offset == 10 * 1024
    assert allocator.allocate((1,), U8, MemoryFormat.BINARY) is None
    assert allocator.memcheck().num_objects == 11
    assert allocator.memcheck().free_bytes == 0
    for obj in [buffer, *tensors]:
        obj.ref_count_down()
    assert allocator.memcheck().used_bytes == 0
    allocator.close()


def test_what_can_ever_fit_depends_on_the_format():
    """Fault 25: room in the other pool is no room."""
    allocator = initialize_allocator(2048, chunk_bytes=256, buffer_bytes=1024)
    assert allocator.can_ever_fit(256, 4)
    assert not allocator.can_ever_fit(1000)
    assert allocator.can_ever_fit(1000, 1, MemoryFormat.BINARY)
    assert not allocator.can_ever_fit(1025, 1, MemoryFormat.BINARY)
    allocator.close()


@pytest.mark.parametrize("fmt", [MemoryFormat.BINARY, MemoryFormat.KV_2TD])
def test_a_release_in_either_pool_wakes_who_waits(fmt):
    allocator = initialize_allocator(4096, chunk_bytes=256, buffer_bytes=1024)
    obj = allocator.allocate((2, 4, 8), U8, fmt)
    seen = allocator.release_count
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(allocator.wait_for_release, seen, 20.0)
        obj.ref_count_down()
        assert answer.result(timeout=30)
    assert allocator.memcheck().used_bytes == 0
    allocator.close()


def test_two_pools_need_one_signal():
    arena = Arena(4096)
    first = PagedAllocator(arena, 64, size_bytes=1024)
    second = GeneralAllocator(arena, offset=1024)
    with pytest.raises(ValueError, match="ReleaseSignal"):
        MixedMemoryAllocator(first, second)
    first.close()
    second.close()
    signal = ReleaseSignal()
    arena = Arena(4096)
    first = PagedAllocator(arena, 64, size_bytes=1024, signal=signal)
    MixedMemoryAllocator(first, GeneralAllocator(arena, offset=1024, signal=signal)).close()
    assert arena.is_closed


def test_the_factory_chooses_by_what_is_known():
    paged = initialize_allocator(4096, chunk_bytes=100)
    general = initialize_allocator(4096, chunk_bytes=None)
    mixed = initialize_allocator(4096, chunk_bytes=None, buffer_bytes=100)
    assert isinstance(paged, PagedAllocator)
    assert isinstance(general, GeneralAllocator)
    assert isinstance(mixed.tensor_allocator, GeneralAllocator)
    for allocator in (paged, general, mixed):
        assert allocator.memcheck().used_bytes == 0
        allocator.close()


@pytest.mark.parametrize(
    ("size_bytes", "chunk_bytes", "buffer_bytes"),
    [(0, 64, 0), (-5, None, 0), (4096, 0, 0), (4096, 64, -1), (4096, 64, 4096), (100, 64, 90)],
)
def test_impossible_sizes_are_errors(size_bytes, chunk_bytes, buffer_bytes):
    with pytest.raises(ValueError):
        initialize_allocator(size_bytes, chunk_bytes=chunk_bytes, buffer_bytes=buffer_bytes)
