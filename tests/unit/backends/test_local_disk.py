"""LocalDiskBackend: restarts, order of eviction, leases, sharing, refusals."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvkeep.backends.base import Lease, PutOutcome
from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.codec.frame import HEADER_BYTES
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.metrics import Metrics
from kvkeep.testing.chunks import (
    CHUNK_BYTES,
    DTYPE,
    SHAPE,
    check_found,
    fill,
    make_keys,
    make_pool,
    put,
    wait_until,
)
from support.disk import IDENTITY, FaultyIO, chunk_files, chunk_path, file_bytes, make_disk

WAIT_S = 20.0
KEYS = make_keys(8)
#: A budget of exactly 8 chunks, each of which is accounted as one block.
ROOM_FOR_8 = 4096 + 8 * 4096


@pytest.fixture
def pool():
    pool = make_pool()
    yield pool
    pool.clear()
    wait_until(lambda: pool.memcheck().num_objects == 0)
    pool.close()


@pytest.fixture
def open_disk(pool, tmp_path):
    opened = []

    def open_one(**options):
        opened.append(make_disk(pool, tmp_path, **options))
        return opened[-1]

    yield open_one
    for disk in opened:
        disk.close()


def read(disk, keys):
    return check_found(keys, disk.batched_get_blocking(keys))


def test_chunks_are_found_again_after_a_restart(pool, open_disk):
    """Fault 37: found, counted and served; shape, dtype and format come from the header."""
    disk = open_disk()
    put(disk, pool, KEYS)
    disk.close()
    disk = open_disk()
    assert sorted(disk.keys()) == sorted(KEYS)
    assert disk.used_bytes() == 4096 * 9
    with References([disk.get_blocking(KEYS[3])]) as held:
        meta = held.objects[0].metadata
        assert (meta.shape, meta.dtype) == (SHAPE, DTYPE)
        assert meta.fmt is MemoryFormat.OPAQUE_PAGES
    assert read(disk, KEYS) == [True] * 8


def test_a_start_is_not_waited_for_without_end(pool, open_disk):
    """With very many chunks, or a slow disk, the engine goes on and finds them later."""
    put(open_disk(), pool, KEYS)
    io, is_free = FaultyIO(), threading.Event()
    io.before = lambda operation: is_free.wait(WAIT_S) if operation == "open_read" else None
    disk = open_disk(io=io, open_timeout_s=0.05)
    try:
        assert disk.health().detail == "not_open"
        assert disk.batched_contains(KEYS) == 0
        assert disk.batched_get_blocking(KEYS) == [None] * len(KEYS)
        with References(fill(pool, KEYS[:1])) as held:
            assert disk.batched_submit_put_task(KEYS[:1], held.objects) == [PutOutcome.DROPPED]
    finally:
        is_free.set()
    wait_until(lambda: disk.health().healthy)
    assert disk.batched_contains(KEYS) == len(KEYS)


def test_closing_writes_what_is_queued(pool, open_disk):
    disk = open_disk()
    with References(fill(pool, KEYS)) as held:
        disk.batched_submit_put_task(KEYS, held.objects)
    disk.close()
    assert read(open_disk(), KEYS) == [True] * 8


def test_files_are_named_by_the_key_and_private(pool, open_disk, tmp_path):
    """Fault 16: no model name and no separator ever gets into a path."""
    put(open_disk(), pool, KEYS)
    names = {path.name for path in chunk_files(tmp_path)}
    assert names == {key.hex() + ".kvc" for key in KEYS}
    for path in [tmp_path / ROOT_NAME, *chunk_files(tmp_path)]:
        assert path.stat().st_mode & 0o077 == 0
    assert chunk_path(tmp_path, KEYS[0]).stat().st_size == HEADER_BYTES + CHUNK_BYTES


@pytest.mark.parametrize("restarted", [False, True])
def test_suffixes_are_evicted_before_their_prefix(pool, open_disk, restarted):
    """Also after a restart, when only the files know the order."""
    disk = open_disk(size_bytes=ROOM_FOR_8)
    put(disk, pool, KEYS)
    if restarted:
        disk.close()
        disk = open_disk(size_bytes=ROOM_FOR_8)
    put(disk, pool, make_keys(3, first=50))
    assert read(disk, KEYS) == [True] * 5 + [False] * 3
    assert read(disk, make_keys(3, first=50)) == [True] * 3


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_read_is_kept_longest(pool, open_disk, restarted):
    disk = open_disk(size_bytes=ROOM_FOR_8)
    for key in KEYS:
        put(disk, pool, [key])
    assert read(disk, KEYS[:3]) == [True] * 3
    if restarted:
        disk.close()
        disk = open_disk(size_bytes=ROOM_FOR_8)
    put(disk, pool, make_keys(5, first=50))
    assert read(disk, KEYS) == [True] * 3 + [False] * 5


def test_a_smaller_budget_at_a_restart(pool, open_disk, tmp_path):
    disk = open_disk()
    put(disk, pool, KEYS)
    disk.close()
    disk = open_disk(size_bytes=ROOM_FOR_8 - 4 * 4096)
    assert file_bytes(tmp_path) == disk.used_bytes() == 5 * 4096
    assert read(disk, KEYS) == [True] * 4 + [False] * 4


def test_the_smallest_of_two_budgets_counts(pool, open_disk, tmp_path):
    """Two processes with different settings: nobody's budget is exceeded."""
    large = open_disk()
    put(large, pool, KEYS)
    small = open_disk(size_bytes=ROOM_FOR_8 - 4 * 4096)
    assert file_bytes(tmp_path) == 5 * 4096
    put(large, pool, make_keys(4, first=50))
    assert file_bytes(tmp_path) == 5 * 4096
    small.close()
    put(large, pool, make_keys(4, first=60))
    assert file_bytes(tmp_path) == 9 * 4096


def test_nothing_is_evicted_in_vain(pool, open_disk):
    """A chunk that fits this tier's budget, but not another's, costs nobody a chunk."""
    metrics = Metrics()
    large = open_disk(metrics=metrics)
    put(large, pool, KEYS)
    open_disk(size_bytes=4096)
    with References(fill(pool, make_keys(1, first=50))) as held:
        large.batched_submit_put_task(make_keys(1, first=50), held.objects)
    assert large.flush(WAIT_S)
    values = metrics.snapshot()
    assert values['kvkeep_dropped_chunks_total{tier="LocalDiskBackend",cause="no_room"}'] == 1
    assert 'kvkeep_evictions_total{tier="LocalDiskBackend"}' not in values


def test_a_chunk_larger_than_the_budget(pool, open_disk):
    metrics = Metrics()
    disk = open_disk(size_bytes=4096 + 100, metrics=metrics)
    assert put(disk, pool, KEYS[:2]) == [PutOutcome.NO_ROOM] * 2
    assert _failures(metrics, "put", "too_large") == 2
    assert disk.keys() == []


def test_a_lookup_that_pins_has_read_the_chunks(pool, open_disk, tmp_path):
    """Spec 1.16: after the answer the files may go, and the load still cannot fail."""
    disk = open_disk()
    put(disk, pool, KEYS)
    pool.clear()
    lease = Lease("request", time.monotonic() + 60)
    assert disk.batched_contains([*KEYS, *make_keys(1, first=99)], pin=lease) == 8
    for path in chunk_files(tmp_path):
        path.unlink()
    assert check_found(KEYS, [lease.get(key) for key in KEYS]) == [True] * 8
    assert pool.batched_contains(KEYS) == 8, "promoted to the first tier, too"
    lease.release()
    pool.clear()
    assert not disk.batched_contains(KEYS, pin=Lease("other", time.monotonic() + 60))


def test_a_pinning_lookup_does_not_read_what_the_cpu_tier_has(pool, open_disk):
    """Spec 4.6 hands a whole run to this tier, parts of which may be in memory already."""
    metrics = Metrics()
    disk = open_disk(metrics=metrics)
    put(disk, pool, KEYS)
    pool.clear()
    put(pool, pool, KEYS[2:5])
    lease = Lease("request", time.monotonic() + 60)
    assert disk.batched_contains(KEYS, pin=lease) == 8
    loaded = metrics.snapshot()[
        'kvkeep_transfer_bytes_sum{tier="LocalDiskBackend",direction="load"}'
    ]
    assert loaded == 5 * CHUNK_BYTES
    assert pool.memcheck().num_objects == 8
    assert check_found(KEYS, [lease.get(key) for key in KEYS]) == [True] * 8
    lease.release()


def test_a_pinning_lookup_answers_only_for_what_verifies(pool, open_disk, tmp_path):
    """Fault 3: chunk 3 of 8 is damaged; the answer is 3, and nothing leaks."""
    disk = open_disk()
    put(disk, pool, KEYS)
    pool.clear()
    assert disk.batched_contains(KEYS) == 8
    os.truncate(chunk_path(tmp_path, KEYS[3]), 100)
    lease = Lease("request", time.monotonic() + 60)
    assert disk.batched_contains(KEYS, pin=lease) == 3
    assert len(lease) == 3
    lease.release()
    wait_until(lambda: pool.memcheck().num_objects == 3)  # loads that had begun end first


def test_a_lookup_of_several_runs_has_one_deadline(pool, open_disk):
    """Fault 42: a slow disk that is asked again gets no time of its own."""
    io, goes_on = FaultyIO(), threading.Event()
    disk = open_disk(io=io, lookup_timeout_s=60.0)
    put(disk, pool, KEYS)
    pool.clear()
    put(pool, pool, KEYS[:2])
    io.before = lambda operation: goes_on.wait(WAIT_S)
    lease = Lease("request", time.monotonic() + 600)
    lease.opened -= 100.0  # the runs before took so long
    with ThreadPoolExecutor(1) as caller:
        answer = caller.submit(disk.batched_contains, KEYS, pin=lease)
        try:
            assert answer.result(WAIT_S / 2) == 2, "what is in memory needs no time"
        finally:
            goes_on.set()
    lease.release()
    assert disk.flush(WAIT_S)


def test_a_pinning_lookup_with_little_memory(tmp_path):
    """It answers for as many chunks as there is memory for, and waits for none."""
    pool = make_pool(8)
    disk = make_disk(pool, tmp_path)
    put(disk, pool, KEYS)
    pool.clear()
    taken = fill(pool, make_keys(5, first=50))
    lease = Lease("request", time.monotonic() + 60)
    assert disk.batched_contains(KEYS, pin=lease) == 3
    lease.release()
    pool.clear()
    with References(taken):
        assert read(disk, KEYS) == [True] * 3 + [False] * 5
    assert read(disk, KEYS) == [True] * 8
    disk.close()
    pool.close()


def test_a_pinning_lookup_does_not_evict_its_own_prompt(tmp_path):
    """What the first tier has of the same prompt, further on, stays there."""
    pool = make_pool(8)
    disk = make_disk(pool, tmp_path)
    put(disk, pool, KEYS)
    pool.clear()
    put(pool, pool, KEYS[4:])
    put(pool, pool, make_keys(4, first=50))
    lease = Lease("request", time.monotonic() + 60)
    assert disk.batched_contains(KEYS, pin=lease) == 8
    assert pool.batched_contains(KEYS) == 8
    lease.release()
    disk.close()
    pool.close()


def test_reading_what_another_process_wrote(pool, open_disk):
    """Neither a restart nor a message is needed, with every verb."""
    one, two = open_disk(), open_disk()
    put(one, pool, KEYS)
    assert two.keys() == []
    assert two.batched_contains(KEYS[:2]) == 2
    assert read(two, KEYS[2:4]) == [True] * 2
    future = two.batched_get_non_blocking(KEYS[4:6])
    assert check_found(KEYS[4:6], future.result(WAIT_S)) == [True] * 2
    lease = Lease("request", time.monotonic() + 60)
    pool.clear()
    assert two.batched_contains(KEYS[6:], pin=lease) == 2
    lease.release()
    assert two.remove(KEYS[7])
    assert read(one, KEYS) == [True] * 7 + [False]


def test_a_chunk_that_another_process_wrote_is_not_written_again(pool, open_disk, tmp_path):
    one, two = open_disk(), open_disk()
    put(one, pool, KEYS[:1])
    inode = chunk_path(tmp_path, KEYS[0]).stat().st_ino
    put(two, pool, KEYS[:1])
    assert chunk_path(tmp_path, KEYS[0]).stat().st_ino == inode
    assert read(two, KEYS[:1]) == [True]


def test_engines_of_other_models_share_the_directory(pool, open_disk):
    """Each sees and clears its own; both count; the other's is evicted in its turn."""
    other_identity = replace(IDENTITY, model="another")
    mine = open_disk(size_bytes=ROOM_FOR_8)
    other = open_disk(size_bytes=ROOM_FOR_8, identity=other_identity)
    put(mine, pool, KEYS[:4])
    put(other, pool, KEYS[4:])
    other.close()
    mine.close()
    mine = open_disk(size_bytes=ROOM_FOR_8)
    assert sorted(mine.keys()) == sorted(KEYS[:4])
    assert mine.clear() == 4
    put(mine, pool, make_keys(6, first=50))
    mine.close()
    other = open_disk(size_bytes=ROOM_FOR_8, identity=other_identity)
    assert read(other, KEYS[4:]) == [True, True, False, False]


def test_two_shapes_in_one_batch(pool, open_disk):
    """The unfull tail of a prompt is smaller than its other chunks."""
    disk = open_disk()
    put(disk, pool, KEYS[:2])
    with References([pool.allocate((3, 1, 16), DTYPE, MemoryFormat.OPAQUE_PAGES)]) as held:
        held.objects[0].array[:] = 7
        disk.batched_submit_put_task([KEYS[2]], held.objects)
    assert disk.flush(WAIT_S)
    with References(disk.batched_get_blocking(KEYS[:3])) as held:
        shapes = [obj.metadata.shape for obj in held.objects]
        assert shapes == [SHAPE, SHAPE, (3, 1, 16)]
        assert held.objects[2].array.tobytes() == b"\7" * 48


def test_loads_as_a_future(pool, open_disk):
    disk = open_disk()
    put(disk, pool, KEYS[:2])
    keys = [KEYS[0], KEYS[5], KEYS[1]]
    future = disk.batched_get_non_blocking(keys)
    assert not future.cancel()
    assert check_found(keys, future.result(WAIT_S)) == [True, False, True]


def test_an_io_thread_never_waits_for_memory(tmp_path):
    """Fault 27: a future's load with a full pool is a miss at once."""
    pool = make_pool(8)
    disk = make_disk(pool, tmp_path)
    put(disk, pool, KEYS)
    pool.clear()
    pool._alloc_timeout_s = 10 * WAIT_S  # whoever waits for memory comes too late
    with References(fill(pool, make_keys(8, first=50))):
        assert disk.batched_get_non_blocking(KEYS).result(WAIT_S) == [None] * 8
    disk.close()
    pool.close()


def test_a_load_waits_for_memory_that_is_released(tmp_path):
    pool = make_pool(8)
    disk = make_disk(pool, tmp_path)
    put(disk, pool, KEYS)
    pool.clear()
    taken = References(fill(pool, make_keys(8, first=50)))
    with ThreadPoolExecutor(1) as other:
        loading = other.submit(disk.batched_get_blocking, KEYS)
        wait_until(lambda: not loading.done())
        taken.release()
        assert check_found(KEYS, loading.result(WAIT_S)) == [True] * 8
    disk.close()
    pool.close()


def test_a_removed_chunk_that_was_being_written(pool, open_disk):
    """Fault 23: the removal wins, and the chunk can be stored again at once."""
    io = FaultyIO()
    disk = open_disk(io=io)
    go_on, writing = threading.Event(), threading.Event()

    def before(operation):
        if operation == "write":
            writing.set()
            assert go_on.wait(WAIT_S)

    io.before = before
    with References(fill(pool, KEYS[:1])) as held:
        disk.batched_submit_put_task(KEYS[:1], held.objects)
    assert writing.wait(WAIT_S)
    assert not disk.remove(KEYS[0])
    with References(fill(pool, KEYS[:1])) as held:
        outcomes = disk.batched_submit_put_task(KEYS[:1], held.objects)
    assert outcomes == [PutOutcome.STORED]
    go_on.set()
    assert disk.flush(WAIT_S)
    assert read(disk, KEYS[:1]) == [True]


def test_metrics(pool, open_disk):
    metrics = Metrics()
    disk = open_disk(metrics=metrics, size_bytes=ROOM_FOR_8)
    put(disk, pool, KEYS)
    read(disk, KEYS)
    put(disk, pool, make_keys(2, first=50))
    values = metrics.snapshot()
    tier = 'tier="LocalDiskBackend"'
    assert values[f'kvkeep_transfer_bytes_sum{{{tier},direction="store"}}'] == 10 * CHUNK_BYTES
    assert values[f'kvkeep_transfer_bytes_sum{{{tier},direction="load"}}'] == 8 * CHUNK_BYTES
    assert values[f"kvkeep_evictions_total{{{tier}}}"] == 2
    assert values[f"kvkeep_chunks{{{tier}}}"] == 8
    assert [name for name in values if "failures" in name or "dropped" in name] == []


def _failures(metrics, operation, cause):
    labels = f'tier="LocalDiskBackend",operation="{operation}",cause="{cause}"'
    return metrics.snapshot().get(f"kvkeep_failures_total{{{labels}}}", 0)
