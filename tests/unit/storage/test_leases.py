"""The table of leases, on a clock that the test turns."""

from __future__ import annotations

import threading

import pytest

from kvkeep.storage.leases import LeaseTable
from kvkeep.testing.chunks import check_found, make_keys, make_pool, put


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def expired():
    return []


@pytest.fixture
def table(clock, expired):
    table = LeaseTable(timeout_s=10.0, clock=clock, on_expired=lambda x: expired.append(x.owner))
    yield table
    assert len(table) == 0


@pytest.fixture
def pool():
    pool = make_pool(4)
    put(pool, pool, make_keys(4))
    yield pool
    assert not any(obj.is_pinned for obj in pool.hot_cache.values())
    pool.clear()
    assert pool.memcheck().num_objects == 0
    pool.close()


def pinned(pool):
    return [key for key in make_keys(4) if pool.hot_cache[key].is_pinned]


def look_up(table, pool, lookup_id, keys):
    lease = table.open(lookup_id)
    assert pool.batched_contains(keys, pin=lease) == len(keys)
    table.keep(lookup_id, lease)
    return lease


def test_a_lookup_that_is_given_up_is_released(table, pool):
    """Fault 17: pinned, then aborted before it was scheduled. Releasing it twice does nothing."""
    look_up(table, pool, "one", make_keys(3))
    assert pinned(pool) == make_keys(3)
    assert table.release("one")
    assert pinned(pool) == []
    assert not table.release("one")
    assert not table.release("never")


def test_a_claimed_lease_is_the_claimants(table, pool, clock):
    """Fault 22 and fault 13: no deadline ends it under a slow reader."""
    keys = make_keys(2)
    look_up(table, pool, "one", keys)
    lease = table.claim("one")
    assert table.claim("one") is None
    assert not table.release("one")
    clock.now = 1000.0
    assert table.reap() == 0
    assert pinned(pool) == keys
    assert check_found(keys, [lease.get(key) for key in keys]) == [True, True]
    lease.release()


def test_an_expired_lease_is_no_claim(table, pool, clock, expired):
    """Spec 1.16: it is a miss, and its pins are given back."""
    look_up(table, pool, "one", make_keys(2))
    clock.now = 10.0
    assert table.claim("one") is None
    assert pinned(pool) == []
    assert expired == ["one"]


def test_a_second_lookup_under_one_id_keeps_its_own_pins(table, pool):
    """Fault 21: the first one's pins are given back, after the second one's are taken."""
    look_up(table, pool, "one", make_keys(3))
    second = look_up(table, pool, "one", make_keys(2))
    assert len(table) == 1
    assert pinned(pool) == make_keys(2)
    assert [pool.hot_cache[key].pin_count for key in make_keys(2)] == [1, 1]
    table.keep("one", second)
    assert pinned(pool) == make_keys(2)
    table.release("one")


def test_keep_has_no_moment_without_a_pin(table, pool):
    """Fault 21: what both lookups found is pinned throughout."""
    look_up(table, pool, "one", make_keys(1))
    counts = []
    unpin = pool.batched_unpin

    def watch(entries):
        counts.append(pool.hot_cache[make_keys(1)[0]].pin_count)
        unpin(entries)

    pool.batched_unpin = watch
    look_up(table, pool, "one", make_keys(1))
    assert counts == [2]
    table.release("one")


@pytest.mark.parametrize("use", ["open", "keep", "claim", "reap"])
def test_expired_leases_are_taken_back_by_use(table, pool, clock, expired, use):
    look_up(table, pool, "old", make_keys(1))
    clock.now = 5.0
    young = look_up(table, pool, "young", make_keys(2))
    clock.now = 12.0
    if use == "open":
        table.open("new").release()
    elif use == "keep":
        table.keep("young", young)
    elif use == "claim":
        assert table.claim("nobody") is None
    else:
        assert table.reap() == 1
    assert expired == ["old"]
    assert pinned(pool) == make_keys(2)
    assert [pool.hot_cache[key].pin_count for key in make_keys(2)] == [1, 1]
    clock.now = 15.0
    assert table.reap() == 1
    assert table.reap() == 0
    assert expired == ["old", "young"]


def test_release_all(table, pool):
    look_up(table, pool, "one", make_keys(1))
    look_up(table, pool, "two", make_keys(2))
    assert table.release_all() == 2
    assert table.release_all() == 0
    assert pinned(pool) == []


def test_threads_claim_a_lease_once(table, pool):
    claimed = []

    def work(number):
        for step in range(50):
            lookup_id = str(step % 5)
            look_up(table, pool, lookup_id, make_keys(1 + number % 3))
            lease = table.claim(lookup_id)
            if lease is not None:
                claimed.append(lease)
                lease.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(claimed) == len({id(lease) for lease in claimed})
    table.release_all()
