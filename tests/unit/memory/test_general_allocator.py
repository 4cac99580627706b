"""GeneralAllocator beyond the contract: best fit, joined neighbours, fragmentation."""

from __future__ import annotations

import pytest
import torch

from kvkeep.errors import OwnershipError
from kvkeep.memory.allocators import GeneralAllocator
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import batched_ref_count_down

U8 = torch.uint8


def take(allocator, size_bytes):
    return allocator.allocate((size_bytes,), U8)


def test_the_smallest_sufficient_range_is_used():
    allocator = GeneralAllocator(Arena(64 * 20))
    objects = [take(allocator, 64 * size) for size in (3, 1, 2, 1, 4, 1)]
    for index in (0, 2, 4):
        objects[index].ref_count_down()
    placed = take(allocator, 2 * 64), take(allocator, 3 * 64), take(allocator, 4 * 64)
    assert [obj.offset // 64 for obj in placed] == [4, 0, 7]
    batched_ref_count_down([objects[1], objects[3], objects[5], *placed])
    assert allocator.memcheck().used_bytes == 0
    allocator.close()


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)]
)
def test_neighbours_are_joined_in_every_order(order):
    allocator = GeneralAllocator(Arena(64 * 3))
    objects = [take(allocator, 64) for _ in range(3)]
    assert take(allocator, 1) is None
    for index in order:
        objects[index].ref_count_down()
        allocator.memcheck()
    whole = take(allocator, 64 * 3)
    assert whole.offset == 0
    whole.ref_count_down()
    assert allocator.memcheck().free_bytes == 64 * 3
    allocator.close()


def test_a_batch_that_fits_by_bytes_but_not_by_ranges_takes_nothing():
    """Fault 26: the ranges that were found before the failure go back, joined as before."""
    allocator = GeneralAllocator(Arena(64 * 9))
    objects = [take(allocator, 64) for _ in range(9)]
    for index in (0, 1, 3, 5, 6, 8):
        objects[index].ref_count_down()
    before = allocator.memcheck()
    assert allocator.batched_allocate((128,), U8, 3) is None
    assert allocator.memcheck() == before
    assert sorted(allocator._free_by_start.items()) == [
        (0, 128),
        (192, 256),
        (320, 448),
        (512, 576),
    ]
    pair = allocator.batched_allocate((128,), U8, 2)
    assert [obj.offset for obj in pair] == [0, 320]
    batched_ref_count_down([*pair, *(objects[index] for index in (2, 4, 7))])
    assert allocator.memcheck().used_bytes == 0
    allocator.close()


def test_sizes_are_rounded_to_the_alignment():
    allocator = GeneralAllocator(Arena(4096 * 3), align=4096)
    objects = [take(allocator, size) for size in (1, 4097)]
    assert [obj.offset for obj in objects] == [0, 4096]
    assert allocator.memcheck().used_bytes == 4096 * 3
    assert allocator.can_ever_fit(4096, 3)
    assert not allocator.can_ever_fit(4097, 2)
    batched_ref_count_down(objects)
    assert allocator.memcheck().used_bytes == 0
    allocator.close()


@pytest.mark.parametrize("align", [0, -64, 32, 100])
def test_a_wrong_alignment_is_an_error(align):
    arena = Arena(4096)
    with pytest.raises(ValueError, match="align"):
        GeneralAllocator(arena, align=align)
    arena.close()


def test_memcheck_finds_a_lost_range():
    allocator = GeneralAllocator(Arena(64 * 4))
    objects = [take(allocator, 64) for _ in range(2)]
    end = allocator._free_by_start.pop(128)
    with pytest.raises(OwnershipError, match="used and free ranges are 128 bytes of 256"):
        allocator.memcheck()
    allocator._free_by_start[128] = end
    allocator._used[0] += 64
    with pytest.raises(OwnershipError, match="overlaps"):
        allocator.memcheck()
    allocator._used[0] -= 64
    batched_ref_count_down(objects)
    assert allocator.memcheck().used_bytes == 0
    allocator.close()
