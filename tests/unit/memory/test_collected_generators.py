"""What the garbage collector gives back while a pool's lock is held, in the same thread."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from kvkeep.memory.allocators import GeneralAllocator, PagedAllocator
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import References, batched_pin, batched_ref_count_down, batched_unpin
from kvkeep.memory.factory import initialize_allocator

ROUNDS = 400
POOL_BYTES = 64 * 256


@pytest.fixture
def eager_collector():
    """Collects at nearly every allocation, and looks at this test's objects only."""
    old = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*old)
    gc.unfreeze()


def test_memory_that_the_collector_freed_in_between_is_not_freed_again():
    """The last reference may go after the count was lowered and before it is looked at."""
    allocator = PagedAllocator(Arena(POOL_BYTES), 320)
    obj, other = allocator.batched_allocate((320,), torch.uint8, 2)
    obj.ref_count_up()
    with allocator.count_lock:
        obj._refs -= 1
        obj.ref_down_locked()
        obj._note_release_locked()
    assert allocator.memcheck().num_objects == 1
    other.ref_count_down()
    assert allocator.memcheck().used_bytes == 0
    allocator.close()


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("eager_collector")
@pytest.mark.parametrize(
    "make",
    [
        lambda: PagedAllocator(Arena(POOL_BYTES), 320),
        lambda: GeneralAllocator(Arena(POOL_BYTES)),
        lambda: initialize_allocator(POOL_BYTES, chunk_bytes=320, buffer_bytes=64),
    ],
    ids=["paged", "general", "mixed"],
)
def test_an_abandoned_generator_is_collected_at_any_moment(make):
    """Fault 19: no deadlock, no damage to the lists, nothing leaks."""
    allocator = make()
    rng = random.Random(1)
    num_closed = 0

    def take(count):
        shape = (rng.randint(1, 320),)
        objects = allocator.batched_allocate(shape, torch.uint8, count)
        while objects is None:
            gc.collect()
            objects = allocator.batched_allocate(shape, torch.uint8, count)
        return objects

    def hold():
        nonlocal num_closed
        with References(take(2)) as held:
            batched_pin(held.objects)
            try:
                yield
            finally:
                batched_unpin(held.objects)
                num_closed += 1

    def abandon():
        cycle = {"generator": hold()}
        cycle["self"] = cycle
        next(cycle["generator"])

    for _ in range(ROUNDS):
        abandon()
        objects = take(3)
        allocator.memcheck()
        batched_ref_count_down(objects)
    gc.collect()
    assert num_closed == ROUNDS
    report = allocator.memcheck()
    assert (report.num_objects, report.free_bytes) == (0, report.capacity_bytes)
    allocator.close()
