"""What the reference backend does beyond the contract."""

from __future__ import annotations

import time

import pytest
import torch

from kvkeep.backends.base import Lease, PutOutcome
from kvkeep.backends.reference import DictBackend
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.testing.chunks import (
    CHUNK_BYTES,
    check_found,
    fill,
    make_key,
    make_keys,
    make_pool,
    put,
)


@pytest.fixture
def pool():
    pool = make_pool(4)
    yield pool
    pool.clear()
    assert pool.memcheck().num_objects == 0
    pool.close()


def test_its_capacity_is_kept(pool):
    backend = DictBackend(pool, name="small", capacity_bytes=2 * CHUNK_BYTES)
    keys = make_keys(3)
    outcomes = put(backend, pool, keys)
    assert outcomes == [PutOutcome.STORED, PutOutcome.STORED, PutOutcome.NO_ROOM]
    assert backend.remove(keys[0])
    assert put(backend, pool, keys[2:]) == [PutOutcome.STORED]
    assert sorted(backend.keys()) == sorted(keys[1:])


def test_a_pin_needs_room_in_the_pool(pool):
    """What cannot be held ready is not promised, and nothing is waited for."""
    backend = DictBackend(pool)
    keys = make_keys(4)
    put(backend, pool, keys)
    lease = Lease("request", time.monotonic() + 60)
    with References(fill(pool, make_keys(2, first=10))):
        assert backend.batched_contains(keys, pin=lease) == 2
        assert backend.batched_contains(keys) == 4
        lease.release()


def test_a_load_is_whole_or_nothing(pool):
    """Fault 26: no part of a load is held while the rest is waited for."""
    backend = DictBackend(pool)
    keys = make_keys(3)
    put(backend, pool, keys)
    pool._alloc_timeout_s = 0.05
    with References(fill(pool, make_keys(2, first=10))):
        assert backend.batched_get_blocking(keys) == [None] * 3
        assert pool.memcheck().num_objects == 2
    assert check_found(keys, backend.batched_get_blocking(keys)) == [True] * 3


def test_chunks_of_different_shapes(pool):
    backend = DictBackend(pool)
    keys = [*make_keys(1), make_key("tail")]
    tail = pool.allocate((7,), torch.uint8, MemoryFormat.OPAQUE_PAGES)
    tail.array[:] = 9
    with References([*fill(pool, keys[:1]), tail]) as objs:
        backend.batched_submit_put_task(keys, objs.objects)
    with References(backend.batched_get_blocking(keys)) as held:
        assert [obj.size_bytes for obj in held.objects] == [CHUNK_BYTES, 7]
        assert held.objects[1].array.tolist() == [9] * 7
