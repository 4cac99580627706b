"""A pool that another process, or here another mapping, reads from."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from kvkeep.errors import OwnershipError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.arena import Arena
from kvkeep.memory.factory import initialize_allocator, tensor_pool
from kvkeep.memory.shared import MappedPool

PAGES = MemoryFormat.OPAQUE_PAGES


def test_what_the_owner_writes_is_read_and_not_the_other_way_round() -> None:
    allocator = initialize_allocator(1 << 20, chunk_bytes=4096, shareable=True)
    arena = tensor_pool(allocator).arena
    objs = allocator.batched_allocate((4096,), torch.uint8, 3, PAGES)
    mapped = MappedPool(os.dup(arena.fileno), arena.size_bytes)
    for number, obj in enumerate(objs):
        obj.array[:] = number + 1
    views = [mapped.view(arena.offset_of(obj.array), (4096,), torch.uint8, PAGES) for obj in objs]
    assert [int(view.array[0]) for view in views] == [1, 2, 3]
    objs[1].array[:] = 9
    assert (views[1].array == 9).all()
    views[2].array[:] = 77
    assert (objs[2].array == 3).all(), "the owner's memory is the owner's"
    for view in views:
        view.ref_count_down()
    with pytest.raises(OwnershipError):
        views[0].array  # noqa: B018
    for obj in objs:
        obj.ref_count_down()
    mapped.close()
    mapped.close()
    allocator.close()


def test_a_view_stays_readable_after_both_sides_have_closed() -> None:
    arena = Arena(8192, shareable=True)
    arena.array[:] = 5
    mapped = MappedPool(os.dup(arena.fileno), 8192)
    view = mapped.view(0, (8192,), torch.uint8, PAGES).array
    arena.close()
    assert arena.fileno is None
    mapped.close()
    assert (view == 5).all()


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 8193), (8192, 1), (1 << 62, 1)])
def test_a_view_outside_is_refused(offset, size) -> None:
    arena = Arena(8192, shareable=True)
    mapped = MappedPool(os.dup(arena.fileno), 8192)
    with pytest.raises(ValueError, match="not inside"):
        mapped.view(offset, (size,), torch.uint8, PAGES)
    mapped.close()
    arena.close()


def test_less_memory_than_was_said_is_refused_and_nothing_stays_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for size in (0, 8193):
        fd = os.memfd_create("test")
        os.ftruncate(fd, 8192)
        with pytest.raises(ValueError, match="there are no"):
            MappedPool(fd, size)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_memory_without_a_name_keeps_its_size_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    arena = Arena(8192, shareable=True)
    assert arena.shared_name is None
    assert arena.choices[0].chosen == "shared without a name"
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fileno, 10)
    assert set(os.listdir("/dev/shm")) == before
    arena.close()


def test_bytes_of_somebody_else_have_no_place_in_an_arena() -> None:
    arena = Arena(8192, shareable=True)
    with pytest.raises(ValueError, match="not in this arena"):
        arena.offset_of(np.zeros(16, np.uint8))
    assert arena.offset_of(arena.array[100:200]) == 100
    arena.close()
    assert Arena(8192).fileno is None
