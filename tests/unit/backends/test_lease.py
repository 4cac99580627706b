"""What a lease holds and gives back."""

from __future__ import annotations

import time

import pytest

from kvkeep.backends.lease import Lease
from kvkeep.backends.reference import DictBackend
from kvkeep.memory.ownership import References
from kvkeep.testing.chunks import check_found, make_keys, make_pool, put
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend


@pytest.fixture
def pool():
    pool = make_pool(8)
    yield pool
    pool.clear()
    assert pool.memcheck().num_objects == 0
    pool.close()


def test_a_lease_over_two_tiers(pool):
    keys = make_keys(4)
    lower = DictBackend(pool)
    put(pool, pool, keys[:2])
    put(lower, pool, keys[2:])
    lease = Lease("both", time.monotonic() + 60)
    assert pool.batched_contains(keys[:2], pin=lease) == 2
    assert lower.batched_contains(keys[2:], pin=lease) == 2
    assert len(lease) == 4
    assert check_found(keys, [lease.get(key) for key in keys]) == [True] * 4
    assert all(obj.is_pinned for obj in pool.hot_cache.values())
    lease.release()
    assert len(lease) == 0
    assert not any(obj.is_pinned for obj in pool.hot_cache.values())


def test_a_backend_that_fails_keeps_no_other_pins(pool):
    """The pins of the others are given back all the same."""
    keys = make_keys(2)
    lower = FaultyBackend(DictBackend(pool), [Fault("unpin", FaultKind.RAISE)])
    put(pool, pool, keys[:1])
    put(lower, pool, keys[1:])
    lease = Lease("both", time.monotonic() + 60)
    entries = []
    for key in keys[1:]:
        with References([lower.get_blocking(key)]) as held:
            held.objects[0].pin()
            entries.append((key, held.objects[0]))
    assert lease.add_all(lower, entries)
    assert pool.contains(keys[0], pin=lease)
    lease.release()
    assert not any(obj.is_pinned for obj in pool.hot_cache.values())


def test_expiry_is_at_the_deadline():
    lease = Lease("request", 100.0)
    assert not lease.expired(99.9)
    assert lease.expired(100.0)
