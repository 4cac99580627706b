"""The prefaulter: memory is there before its first use, and never much more than that."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
import threading
import uuid
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from kvkeep.memory.allocators import PagedAllocator
from kvkeep.memory.arena import Arena
from kvkeep.memory.factory import initialize_allocator
from kvkeep.memory.prefault import STEP_BYTES, Prefaulter
from kvkeep.testing.chunks import wait_until

MIB = 1 << 20
SLOT = MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux 5.14")


def committed_mib(allocator: PagedAllocator) -> int:
    """MiB of the pool that are in memory, by the system's own count of exactly its pages.

    The mapping as a whole (/proc/self/smaps) would not do: the system joins neighbouring ones.
    """
    array = allocator.arena.array
    pages = np.zeros(-(-array.nbytes // mmap.PAGESIZE), dtype=np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(array.ctypes.data, array.nbytes, pages.ctypes.data) == 0, ctypes.get_errno()
    return int((pages & 1).sum()) * mmap.PAGESIZE // MIB


@pytest.fixture
def allocator():
    made = initialize_allocator(64 * MIB, chunk_bytes=SLOT, huge_pages=False)
    yield made
    assert made.memcheck().used_bytes == 0
    made.close()


@pytest.fixture
def start(allocator):
    """Makes prefaulters that are closed at the end of the test, before the pool is."""
    with ExitStack() as stack:

        def make(ahead_bytes: int, **more) -> Prefaulter:
            made = Prefaulter(allocator, ahead_bytes=ahead_bytes, **more)
            stack.callback(made.close)
            return made

        yield make


def take(allocator: PagedAllocator, count: int) -> list:
    return allocator.batched_allocate((SLOT,), torch.uint8, count)


def test_memory_is_committed_ahead_of_its_first_use_and_not_further(allocator, start) -> None:
    """Fault 50: the first use of fresh memory does not pay for committing it."""
    prefaulter = start(8 * MIB)
    wait_until(lambda: prefaulter.committed == 8 * MIB)
    assert committed_mib(allocator) == 8
    objects = take(allocator, 5)
    wait_until(lambda: prefaulter.committed == 13 * MIB)
    assert committed_mib(allocator) == 13
    for obj in objects:
        obj.ref_count_down()
    again = take(allocator, 5)  # used before: nothing is fresh
    assert prefaulter.committed == 13 * MIB
    objects = again + take(allocator, 53)  # 58 used: the pool ends before the distance does
    wait_until(lambda: prefaulter.committed == 64 * MIB)
    for obj in objects:
        obj.ref_count_down()
    prefaulter.close()  # and again when the test ends


def test_it_writes_nothing(allocator, start) -> None:
    (obj,) = take(allocator, 1)
    obj.array[:] = 7
    prefaulter = start(2 * MIB)
    wait_until(lambda: prefaulter.committed == 3 * MIB)
    assert (obj.array == 7).all()
    (fresh,) = take(allocator, 1)
    assert not fresh.array.any()
    obj.ref_count_down()
    fresh.ref_count_down()


def test_it_runs_behind_all_other_threads(allocator, start) -> None:
    prefaulter = start(MIB)
    (thread,) = [each for each in threading.enumerate() if each.name == "kvkeep-prefault"]
    wait_until(lambda: prefaulter.committed == MIB)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == min(own + 10, 19)
    prefaulter.close()
    assert not thread.is_alive()


def test_memory_that_must_stay_free_is_not_committed(allocator, start, monkeypatch) -> None:
    available = [10 * STEP_BYTES]
    monkeypatch.setattr("kvkeep.memory.prefault.available_bytes", lambda: available[0])
    prefaulter = start(8 * MIB, keep_free_bytes=9 * STEP_BYTES + 1)
    (obj,) = take(allocator, 1)
    wait_until(lambda: not prefaulter._woken.is_set())
    assert prefaulter.committed == 0
    available[0] += 1
    (other,) = take(allocator, 1)
    wait_until(lambda: prefaulter.committed == 10 * MIB)
    obj.ref_count_down()
    other.ref_count_down()


def test_a_system_that_cannot_do_it_is_logged_and_the_pool_works(
    allocator, start, monkeypatch, caplog
) -> None:
    def refuse(self, start, end):
        raise OSError(errno.EINVAL, "memory cannot be committed ahead")

    monkeypatch.setattr(Arena, "prefault", refuse)
    with caplog.at_level(logging.WARNING):
        start(MIB).close()
    assert "not committed ahead" in caplog.text
    (obj,) = take(allocator, 1)
    obj.array[:] = 1
    obj.ref_count_down()


def test_a_pool_that_is_closed_first_ends_it() -> None:
    made = initialize_allocator(64 * MIB, chunk_bytes=SLOT, huge_pages=False)
    prefaulter = Prefaulter(made, ahead_bytes=MIB)
    made.close()
    prefaulter.close()


def test_a_distance_must_be_positive(allocator) -> None:
    with pytest.raises(ValueError, match="positive distance"):
        Prefaulter(allocator, ahead_bytes=0)


def test_other_threads_run_while_memory_is_committed() -> None:
    """The interpreter's lock is not held: a second thread counts during one long call.

    On a machine with much to do it may get no processor during one call, but will during one of
    many.
    """
    started, counted = threading.Event(), []

    def count() -> None:
        started.set()
        while not done.is_set():
            counted.append(1)
            done.wait(0.0005)

    done = threading.Event()
    thread = threading.Thread(target=count)
    thread.start()
    assert started.wait(10)
    during = 0
    for _ in range(50):
        arena = Arena(64 * MIB, huge_pages=False)
        before = len(counted)
        arena.prefault(0, 64 * MIB)  # some ten milliseconds at least
        during = len(counted) - before
        arena.close()
        if during:
            break
    done.set()
    thread.join(10)
    assert during >= 1


def test_shared_memory_is_committed_ahead_too() -> None:
    made = initialize_allocator(
        16 * MIB, chunk_bytes=SLOT, shared_name=f"prefault-{uuid.uuid4().hex}", huge_pages=False
    )
    prefaulter = Prefaulter(made, ahead_bytes=4 * MIB)
    wait_until(lambda: prefaulter.committed == 4 * MIB)
    assert committed_mib(made) == 4
    prefaulter.close()
    made.close()
