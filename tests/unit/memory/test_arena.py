"""Arena: lazy, shareable, safe to close; and the named shared memory below it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import uuid
import weakref
from pathlib import Path

import numpy as np
import pytest

from kvkeep.errors import OwnershipError
from kvkeep.memory.arena import Arena

SHARED = Path("/dev/shm")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def name():
    name = f"arena-{uuid.uuid4().hex}"
    yield name
    assert not (SHARED / f"kvkeep-{name}").exists()


def test_bytes_start_as_zero_and_keep_what_is_written():
    arena = Arena(1 << 20)
    assert arena.array.shape == (1 << 20,)
    assert not arena.array.any()
    arena.array[4095:4098] = (1, 2, 3)
    assert arena.array[4094:4099].tolist() == [0, 1, 2, 3, 0]
    assert arena.shared_name is None
    arena.close()


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_a_size_must_be_positive(size_bytes):
    with pytest.raises(ValueError, match="positive"):
        Arena(size_bytes)


def test_a_huge_arena_commits_next_to_nothing():
    """Fault 50: 64 GiB are reserved, and neither making nor closing them commits memory."""
    before = resident_bytes()
    arena = Arena(64 << 30)
    arena.array[-1] = 1
    assert resident_bytes() - before < 16 << 20
    arena.close()


def test_closing_returns_the_memory():
    size = 64 << 20
    arena = Arena(size)
    arena.array[:] = 1
    before = resident_bytes()
    arena.close()
    assert before - resident_bytes() > size * 3 // 4


def test_prefault_commits_without_changing_content():
    size = 32 << 20
    arena = Arena(size, huge_pages=False)
    arena.array[12345] = 9
    before = resident_bytes()
    arena.prefault(12345, size)
    assert resident_bytes() - before > size * 3 // 4
    assert arena.array[12345] == 9
    assert not arena.array[12346:].any()
    with pytest.raises(ValueError, match="range"):
        arena.prefault(0, size + 1)
    arena.close()
    with pytest.raises(OwnershipError):
        arena.prefault(0, 1)


def test_a_view_outlives_the_arena_and_then_frees_it():
    arena = Arena(16 << 20)
    array = arena.array
    view = array[100:200]
    view[:] = 5
    arena.close()
    arena.close()
    assert arena.is_closed
    with pytest.raises(OwnershipError):
        arena.array  # noqa: B018
    assert (view == 5).all()
    mapping = weakref.ref(array)
    del array, view
    gc.collect()
    assert mapping() is None


def test_a_range_belongs_to_one_allocator():
    arena = Arena(1000)
    arena.claim(100, 200)
    arena.claim(200, 300)
    for start, end in ((150, 160), (0, 101), (299, 1000), (0, 1000)):
        with pytest.raises(ValueError, match="overlaps"):
            arena.claim(start, end)
    for start, end in ((-1, 5), (5, 5), (6, 5), (900, 1001)):
        with pytest.raises(ValueError, match="no range"):
            arena.claim(start, end)
    arena.give_back(100)
    arena.give_back(100)
    assert not arena.is_closed
    arena.give_back(200)
    assert arena.is_closed
    with pytest.raises(OwnershipError):
        arena.claim(0, 1)


def test_shared_memory_is_one_memory_under_one_offset(name):
    made = Arena(1 << 20, shared_name=name)
    made.array[1000] = 42
    program = (
        "import sys; from kvkeep.memory.arena import Arena; a = Arena.attach(sys.argv[1]);"
        "assert a.size_bytes == 1 << 20 and a.array[1000] == 42; a.array[2000] = 43; a.close()"
    )
    subprocess.run([sys.executable, "-c", program, name], check=True, timeout=60)
    assert made.array[2000] == 43
    assert made.shared_name == name
    assert (SHARED / f"kvkeep-{name}").stat().st_mode & 0o777 == 0o600
    made.close()
    with pytest.raises(FileNotFoundError):
        Arena.attach(name)


def test_a_name_in_use_is_refused(name):
    made = Arena(4096, shared_name=name)
    with pytest.raises(OwnershipError, match="living process"):
        Arena(4096, shared_name=name)
    made.close()
    Arena(4096, shared_name=name).close()


def test_a_name_left_by_a_killed_process_is_taken_over(name):
    program = (
        "import sys, time; from kvkeep.memory.arena import Arena\n"
        "a = Arena(8192, shared_name=sys.argv[1]); a.array[:] = 255\n"
        "print('made', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"made\n"
    with pytest.raises(OwnershipError, match="living process"):
        Arena(4096, shared_name=name)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=30)
    arena = Arena(4096, shared_name=name)
    assert not arena.array.any()
    arena.close()


def test_more_shared_memory_than_there_is_is_refused_when_asked_for(name):
    """Rather than a SIGBUS when it is written."""
    with pytest.raises(ValueError, match="asked for"):
        Arena(1 << 50, shared_name=name)


@pytest.mark.parametrize("bad", ["", "../x", "a/b", ".hidden", "a b", "x" * 201])
def test_a_malformed_name_is_refused(bad):
    with pytest.raises(ValueError, match="cannot name"):
        Arena(4096, shared_name=bad)
    with pytest.raises(ValueError, match="cannot name"):
        Arena.attach(bad)


def test_a_view_of_closed_shared_memory_stays_readable(name):
    arena = Arena(4096, shared_name=name)
    view = np.asarray(arena.array[:10])
    view[:] = 3
    arena.close()
    assert (view == 3).all()
