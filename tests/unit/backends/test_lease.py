"""What a lease holds and gives back."""

from __future__ import annotations

import time

import pytest

from kvkeep.backends.base import Lease
from kvkeep.backends.reference import DictBackend
from kvkeep.errors import BackendError
from kvkeep.testing.chunks import check_found, make_keys, make_pool, put


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


class Stubborn(DictBackend):
    """Gives pins back, notes the call, and raises."""

    def __init__(self, pool, error):
        super().__init__(pool)
        self.error = error
        self.num_unpins = 0

    def batched_unpin(self, entries):
        self.num_unpins += 1
        super().batched_unpin(entries)
        raise self.error


@pytest.mark.parametrize(
    "error", [BackendError("no", backend="b", operation="unpin"), OSError("no"), KeyError("no")]
)
def test_a_backend_that_fails_keeps_no_other_pins(pool, error):
    """The pins of the others are given back all the same, whatever it raises."""
    keys = make_keys(2)
    lower = Stubborn(pool, error)
    put(pool, pool, keys[:1])
    put(lower, pool, keys[1:])
    lease = Lease("both", time.monotonic() + 60)
    assert lower.contains(keys[1], pin=lease)
    assert pool.contains(keys[0], pin=lease)
    lease.release()
    assert lower.num_unpins == 1
    assert not any(obj.is_pinned for obj in pool.hot_cache.values())


def test_a_backend_that_is_left_out_is_not_called(pool):
    """Spec 4.10: its pins are given back all the same."""
    keys = make_keys(2)
    lower = Stubborn(pool, OSError("called"))
    put(lower, pool, keys)
    bypassed = set()
    lease = Lease("request", time.monotonic() + 60, is_bypassed=bypassed.__contains__)
    assert lower.batched_contains(keys, pin=lease) == 2
    assert pool.memcheck().num_objects == 2
    bypassed.add(lower.name)
    lease.release()
    assert lower.num_unpins == 0
    assert pool.memcheck().num_objects == 0


def test_expiry_is_at_the_deadline():
    lease = Lease("request", 100.0)
    assert not lease.expired(99.9)
    assert lease.expired(100.0)
