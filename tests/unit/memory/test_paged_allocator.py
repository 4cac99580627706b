"""PagedAllocator beyond the contract: slots, order of reuse, lazy commit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvkeep.errors import OwnershipError
from kvkeep.memory.allocators import PagedAllocator
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import batched_ref_count_down

U8 = torch.uint8


def test_any_shape_that_fits_takes_one_slot():
    allocator = PagedAllocator(Arena(10_000), 1000)
    assert (allocator.slot_bytes, allocator.num_slots) == (1024, 9)
    objects = [allocator.allocate((size,), U8) for size in (1, 1000, 1024)]
    assert [obj.offset for obj in objects] == [0, 1024, 2048]
    assert allocator.allocate((1025,), U8) is None
    assert allocator.memcheck().used_bytes == 3 * 1024
    assert allocator.memcheck().capacity_bytes == 9 * 1024
    batched_ref_count_down(objects)
    assert allocator.memcheck().used_bytes == 0
    allocator.close()


def test_what_was_given_back_last_is_used_first_and_fresh_slots_last():
    allocator = PagedAllocator(Arena(64 * 8), 64)
    objects = allocator.batched_allocate((64,), U8, 4)
    for index in (1, 3, 0):
        objects[index].ref_count_down()
    again = allocator.batched_allocate((64,), U8, 5)
    assert [obj.offset // 64 for obj in again] == [0, 3, 1, 4, 5]
    batched_ref_count_down([objects[2], *again])
    assert allocator.memcheck().free_bytes == 64 * 8
    allocator.close()


def test_a_pool_smaller_than_a_slot_has_no_room_and_says_so():
    allocator = PagedAllocator(Arena(100), 1000)
    assert not allocator.can_ever_fit(1)
    assert allocator.allocate((1,), U8) is None
    assert allocator.batched_allocate((1,), U8, 0) == []
    report = allocator.memcheck()
    assert (report.capacity_bytes, report.free_bytes) == (0, 0)
    allocator.close()


@pytest.mark.parametrize(
    ("slot_bytes", "offset", "size_bytes"), [(0, 0, None), (64, 1, None), (64, 0, 5000), (64, 0, 0)]
)
def test_wrong_sizes_are_errors(slot_bytes, offset, size_bytes):
    arena = Arena(4096)
    with pytest.raises(ValueError):
        PagedAllocator(arena, slot_bytes, offset=offset, size_bytes=size_bytes)
    arena.close()


def test_two_pools_cannot_have_the_same_bytes():
    arena = Arena(4096)
    first = PagedAllocator(arena, 64, size_bytes=1024)
    with pytest.raises(ValueError, match="overlaps"):
        PagedAllocator(arena, 64, offset=960)
    second = PagedAllocator(arena, 64, offset=1024)
    obj = second.allocate((64,), U8)
    assert obj.offset == 1024
    first.close()
    assert not arena.is_closed
    obj.array[:] = 1
    assert arena.array[1024:1088].all()
    obj.ref_count_down()
    assert second.memcheck().num_objects == 0
    second.close()
    assert arena.is_closed


def test_a_huge_pool_commits_only_what_it_hands_out():
    """Fault 50: 64 GiB of slots exist at once; the first chunks commit their own bytes only."""
    statm, page = Path("/proc/self/statm"), os.sysconf("SC_PAGESIZE")
    before = int(statm.read_text().split()[1])
    allocator = PagedAllocator(Arena(64 << 30), 1 << 20)
    assert allocator.memcheck().free_bytes == 64 << 30
    objects = allocator.batched_allocate((1 << 20,), U8, 8)
    for obj in objects:
        obj.array[:] = 1
    assert (int(statm.read_text().split()[1]) - before) * page < (8 + 16) << 20
    batched_ref_count_down(objects)
    assert allocator.memcheck().used_bytes == 0
    allocator.close()


def test_closing_the_arena_below_a_pool_harms_nobody():
    arena = Arena(4096)
    allocator = PagedAllocator(arena, 64)
    obj = allocator.allocate((64,), U8)
    arena.close()
    obj.array[:] = 7
    assert (obj.array == 7).all()
    obj.ref_count_down()
    assert allocator.memcheck().used_bytes == 0
    allocator.close()


def _break_by_count(allocator, objects):
    objects[1]._refs = 0
    return lambda: setattr(objects[1], "_refs", 1)


def _break_by_free_list(allocator, objects):
    allocator._free.append(objects[2].offset)
    return allocator._free.pop


def _break_by_losing_an_object(allocator, objects):
    lost = allocator._living.pop(objects[0].offset)
    return lambda: allocator._living.__setitem__(lost.offset, lost)


def _break_by_losing_a_slot(allocator, objects):
    slot = allocator._free.pop()
    return lambda: allocator._free.append(slot)


def _break_by_moving_an_object(allocator, objects):
    memory = objects[0]._memory
    objects[0]._memory = memory[objects[1].offset - objects[0].offset :]
    return lambda: setattr(objects[0], "_memory", memory)


def _break_by_growing_an_object(allocator, objects):
    meta = objects[0].metadata
    objects[0].metadata = replace(meta, shape=(100,), size_bytes=100)
    return lambda: setattr(objects[0], "metadata", meta)


@pytest.mark.parametrize(
    "break_it",
    [
        _break_by_count,
        _break_by_free_list,
        _break_by_losing_an_object,
        _break_by_losing_a_slot,
        _break_by_moving_an_object,
        _break_by_growing_an_object,
    ],
)
def test_memcheck_finds_what_is_wrong(break_it):
    allocator = PagedAllocator(Arena(64 * 8), 64)
    objects = allocator.batched_allocate((64,), U8, 4)
    objects.pop().ref_count_down()
    allocator.memcheck()
    repair = break_it(allocator, objects)
    with pytest.raises(OwnershipError):
        allocator.memcheck()
    repair()
    batched_ref_count_down(objects)
    assert allocator.memcheck().used_bytes == 0
    allocator.close()
