"""Faults 34, 39, 43: a disk that is full, fails, hangs, forbids, or does less than it was asked.

Requests go on without it within their deadlines, everything is counted by cause, and it comes back
by itself.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kvkeep.backends.base import Lease, PutOutcome
from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.memory.base import References
from kvkeep.metrics import Metrics
from kvkeep.testing.chunks import check_found, fill, make_keys, make_pool, put, wait_until
from support.disk import FaultyIO, file_bytes, make_disk
from support.disk_processes import forbidden_places, rig

WAIT_S = 30.0
KEYS = make_keys(6)


@pytest.fixture
def pool():
    pool = make_pool()
    yield pool
    pool.clear()
    wait_until(lambda: pool.memcheck().num_objects == 0)
    pool.close()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def io():
    return FaultyIO()


@pytest.fixture
def disk(pool, tmp_path, metrics, io):
    disk = make_disk(
        pool,
        tmp_path,
        metrics=metrics,
        io=io,
        load_timeout_s=0.5,
        lookup_timeout_s=0.3,
        stall_timeout_s=0.6,
        close_timeout_s=5.0,
    )
    yield disk
    io.before = lambda operation: None
    disk.close()


@pytest.fixture
def go_on():
    """What a hanging call waits for."""
    event = threading.Event()
    yield event
    event.set()


def count(metrics, name, **labels):
    wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return metrics.snapshot().get(f"kvkeep_{name}_total{{{wanted}}}", 0)


def failures(metrics, operation, cause):
    return count(metrics, "failures", tier="LocalDiskBackend", operation=operation, cause=cause)


def dropped(metrics, cause):
    return count(metrics, "dropped_chunks", tier="LocalDiskBackend", cause=cause)


def fail(*operations, error=errno.EIO):
    def before(operation):
        if not operations or operation in operations:
            raise OSError(error, os.strerror(error))

    return before


def submit(disk, pool, keys):
    with References(fill(pool, keys)) as held:
        outcomes = disk.batched_submit_put_task(keys, held.objects)
    assert disk.flush(WAIT_S)
    return outcomes


@pytest.mark.parametrize("piece", [1, 7, 100, 255, 256, 257])
def test_short_reads_and_writes(pool, tmp_path, piece):
    """The system may move less than it was asked to, at any boundary."""
    disk = make_disk(pool, tmp_path, io=FaultyIO(piece=piece))
    put(disk, pool, KEYS)
    assert check_found(KEYS, disk.batched_get_blocking(KEYS)) == [True] * 6
    disk.close()
    disk = make_disk(pool, tmp_path)
    assert check_found(KEYS, disk.batched_get_blocking(KEYS)) == [True] * 6
    disk.close()


@pytest.mark.parametrize("operation", ["open_new", "write", "rename"])
def test_a_full_disk(disk, pool, tmp_path, metrics, io, operation):
    """Fault 39: nothing partial or reserved stays, and the chunk can be stored later."""
    put(disk, pool, KEYS[:1])
    io.before = fail(operation, error=errno.ENOSPC)
    assert submit(disk, pool, KEYS[1:3]) == [PutOutcome.STORED] * 2
    assert dropped(metrics, "disk_full") == 2
    assert failures(metrics, "put", "disk_full") == 2
    assert disk.keys() == KEYS[:1]
    assert list((tmp_path / ROOT_NAME / "tmp").iterdir()) == []
    assert disk.used_bytes() == file_bytes(tmp_path)
    io.before = fail()
    io.before = lambda operation: None
    put(disk, pool, KEYS)
    assert check_found(KEYS, disk.batched_get_blocking(KEYS)) == [True] * 6


def test_a_full_file_system(pool):
    """Fault 39: a real one of 256 KiB with a budget of 16 MiB: the file system is the limit."""
    path = Path(tempfile.mkdtemp())
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], check=False
    )
    if mount.returncode:
        path.rmdir()
        pytest.skip("mounting a small file system needs the right to mount")
    try:
        metrics = Metrics()
        disk = make_disk(pool, path, metrics=metrics, size_bytes=16 << 20)
        keys = make_keys(100)
        for start in range(0, 100, 10):
            submit(disk, pool, keys[start : start + 10])
        stored = disk.keys()
        assert 10 < len(stored) < 64
        assert dropped(metrics, "disk_full") > 0
        assert sum(check_found(stored[:40], disk.batched_get_blocking(stored[:40]))) == 40
        disk.close()
        disk = make_disk(pool, path, size_bytes=16 << 20)
        assert sorted(disk.keys()) == sorted(stored)
        assert list((path / ROOT_NAME / "tmp").iterdir()) == []
        disk.close()
        # So full that not even the ledger has room: the tier is out, and says so.
        shutil.rmtree(path / ROOT_NAME)
        ballast = path / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
            while True:
                file.write(bytes(4096))
        disk = make_disk(pool, path, metrics=metrics)
        assert not disk.health().healthy
        assert failures(metrics, "open", "disk_full") == 1
        ballast.unlink()
        wait_until(lambda: disk.health().healthy)
        put(disk, pool, KEYS)
        disk.close()
    finally:
        subprocess.run(["umount", str(path)], check=True)
        path.rmdir()


def test_a_disk_that_fails_every_call_and_recovers(disk, pool, metrics, io):
    """Fault 33: misses at once, drops at once, unhealthy; and healthy again without a restart."""
    put(disk, pool, KEYS)
    io.before = fail()
    for key in KEYS[:3]:
        assert disk.batched_get_blocking([key]) == [None]
    assert failures(metrics, "get", "io_error") == 3
    assert not disk.health().healthy
    assert disk.batched_contains(KEYS) == 0
    with References(fill(pool, make_keys(2, first=50))) as held:
        outcomes = disk.batched_submit_put_task(make_keys(2, first=50), held.objects)
    assert outcomes == [PutOutcome.DROPPED] * 2
    assert failures(metrics, "put", "failing") == 1
    wait_until(lambda: not disk.health().healthy and failures(metrics, "check", "io_error") > 0)
    io.before = lambda operation: None
    wait_until(lambda: disk.health().healthy)
    assert check_found(KEYS, disk.batched_get_blocking(KEYS)) == [True] * 6


def test_a_disk_that_cannot_be_written_is_still_read(disk, pool, metrics, io):
    """Fault 39: a directory became read-only."""
    put(disk, pool, KEYS)
    io.before = fail("open_new", error=errno.EROFS)
    for key in make_keys(3, first=50):
        submit(disk, pool, [key])
    assert dropped(metrics, "read_only") == 3
    with References(fill(pool, make_keys(1, first=60))) as held:
        refused = disk.batched_submit_put_task(make_keys(1, first=60), held.objects)
    assert refused == [PutOutcome.DROPPED]
    assert disk.health().healthy
    assert check_found(KEYS, disk.batched_get_blocking(KEYS)) == [True] * 6
    io.before = lambda operation: None
    late = make_keys(1, first=60)
    wait_until(lambda: submit(disk, pool, late) == [PutOutcome.STORED])
    assert check_found(late, disk.batched_get_blocking(late)) == [True]


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
def test_files_that_cannot_be_removed_are_not_served(disk, pool, metrics, io, error):
    """A chunk that was removed stays invisible even if its file does not go."""
    put(disk, pool, KEYS)
    io.before = fail("unlink", error=error)
    assert disk.remove(KEYS[0])
    assert not disk.contains(KEYS[0])
    assert disk.batched_get_blocking(KEYS[:1]) == [None]
    io.before = lambda operation: None
    put(disk, pool, KEYS[:1])
    assert check_found(KEYS, disk.batched_get_blocking(KEYS)) == [True] * 6


def test_a_disk_that_hangs(disk, pool, metrics, io, go_on):
    """Faults 34, 42: loads and lookups are misses at their deadline, later at once; it recovers."""
    put(disk, pool, KEYS)
    pool.clear()
    io.before = lambda operation: None if operation != "read" else _wait(go_on)
    started = time.monotonic()
    lease = Lease("request", time.monotonic() + 60)
    assert disk.batched_contains(KEYS, pin=lease) == 0
    assert time.monotonic() - started > 0.2
    assert len(lease) == 0
    assert disk.batched_get_blocking(KEYS) == [None] * 6
    wait_until(lambda: not disk.health().healthy)
    late = [failures(metrics, operation, "timeout") for operation in ("lookup", "get")]
    assert disk.batched_contains(KEYS, pin=lease) == 0
    assert disk.batched_get_blocking(KEYS) == [None] * 6
    assert disk.batched_get_non_blocking(KEYS).result(0) == [None] * 6
    assert [failures(metrics, operation, "timeout") for operation in ("lookup", "get")] == late
    with References(fill(pool, make_keys(1, first=50))) as held:
        refused = disk.batched_submit_put_task(make_keys(1, first=50), held.objects)
    assert refused == [PutOutcome.DROPPED]
    assert failures(metrics, "put", "stalled") == 1
    go_on.set()
    wait_until(lambda: disk.health().healthy)
    assert check_found(KEYS, disk.batched_get_blocking(KEYS)) == [True] * 6
    assert failures(metrics, "get", "timeout") > 0


def test_slow_stores_are_dropped_and_loads_go_first(disk, pool, metrics, io, tmp_path, go_on):
    """Faults 23, 43: stores behind a slow disk hold bounded memory; no load waits for them."""
    disk.close()
    disk = make_disk(pool, tmp_path, metrics=metrics, io=io, queue_bytes=4 * 192, threads=2)
    put(disk, pool, KEYS[:3])
    put(disk, pool, KEYS[3:])
    io.before = lambda operation: None if operation != "write" else _wait(go_on)
    keys = make_keys(30, first=100)
    with References(fill(pool, keys)) as held:
        outcomes = disk.batched_submit_put_task(keys, held.objects)
    taken = outcomes.count(PutOutcome.STORED)
    assert outcomes == [PutOutcome.STORED] * taken + [PutOutcome.DROPPED] * (30 - taken)
    assert 4 <= taken <= 5
    assert failures(metrics, "put", "queue_full") == 30 - taken
    pool.clear()
    assert pool.memcheck().num_objects <= 5
    assert check_found(KEYS, disk.batched_get_blocking(KEYS)) == [True] * 6
    assert disk.batched_contains(KEYS) == 6
    go_on.set()
    assert disk.flush(WAIT_S)
    assert disk.batched_contains(keys) == taken
    # What was turned away can be stored now.
    assert put(disk, pool, keys[taken : taken + 2]) == [PutOutcome.STORED] * 2
    disk.close()


def test_closing_with_a_hanging_disk(pool, tmp_path, metrics, io, go_on):
    """Closing has a deadline; what was queued is dropped and gives its memory back."""
    disk = make_disk(pool, tmp_path, metrics=metrics, io=io, close_timeout_s=0.2)
    io.before = lambda operation: None if operation != "write" else _wait(go_on)
    with References(fill(pool, KEYS)) as held:
        disk.batched_submit_put_task(KEYS, held.objects)
    disk.close()
    assert not go_on.is_set()
    assert dropped(metrics, "closed") == 5
    go_on.set()


def test_forbidden_places():
    """Fault 39: a file, a directory, a whole tree without rights; and then with them again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.disk_processes"])
    path = Path(tempfile.mkdtemp())
    ours, theirs = context.Pipe()
    process = context.Process(target=forbidden_places, args=(path, theirs))
    try:
        path.chmod(0o777)
        process.start()
        theirs.close()
        assert ours.poll(60.0), "the process did not answer"
        seen = ours.recv()
    finally:
        process.kill()
        process.join(WAIT_S)
        ours.close()
        shutil.rmtree(path)
    assert seen == {
        "forbidden file": (1, 0),
        "its cause": 1.0,
        "forbidden directory, read": (2, 0),
        "forbidden directory, stored": 0,
        "forbidden tree, healthy": False,
        "allowed again, healthy": True,
        "allowed again": (2, 0),
    }


def test_ten_starts_in_a_row(tmp_path):
    """Fault 37: nothing piles up over restarts: members, temporary files, bytes."""
    for _ in range(10):
        with rig(tmp_path) as it:
            it.put(KEYS[:2])
            it.disk.flush(WAIT_S)
    assert list((tmp_path / ROOT_NAME / "members").iterdir()) == []
    assert list((tmp_path / ROOT_NAME / "tmp").iterdir()) == []


def _wait(event):
    assert event.wait(WAIT_S)
