"""The CPU tier: eviction, waiting, pins, order of use, callbacks."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kvkeep.backends.base import Lease, PutOutcome
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.errors import OwnershipError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.names import POLICIES, create_policy
from kvkeep.testing.chunks import (
    CHUNK_BYTES,
    DTYPE,
    SHAPE,
    check_found,
    fill,
    make_key,
    make_keys,
    put,
)

FMT = MemoryFormat.OPAQUE_PAGES
EVICTIONS = 'kvkeep_evictions_total{tier="LocalCPUBackend"}'


@pytest.fixture
def make_pool():
    """A pool that must be whole and empty after the test."""
    pools = []

    def make(capacity=4, policy="lru", chunk_bytes=CHUNK_BYTES, **options):
        allocator = initialize_allocator(capacity * CHUNK_BYTES, chunk_bytes=chunk_bytes)
        options.setdefault("alloc_timeout_s", 2.0)
        options.setdefault("metrics", Metrics())
        pools.append(LocalCPUBackend(allocator, create_policy(policy), **options))
        return pools[-1]

    yield make
    for pool in pools:
        held = [obj for obj in pool.hot_cache.values() if obj.is_pinned or obj.ref_count != 1]
        assert not held
        pool.clear()
        assert pool.memcheck().num_objects == 0
        pool.close()


def take(pool, count=1, **options):
    return pool.batched_allocate(SHAPE, DTYPE, count, FMT, **options)


def lease(owner="request"):
    return Lease(owner, time.monotonic() + 60)


def test_a_full_pool_evicts_exactly_what_is_needed(make_pool):
    metrics = Metrics()
    pool = make_pool(4, metrics=metrics)
    keys = make_keys(3)
    for key in keys:
        put(pool, pool, [key])
    with References(take(pool, 2)):
        assert pool.keys() == keys[1:]
        assert metrics.snapshot()[EVICTIONS] == 1
    with References(take(pool, 2)):
        assert pool.keys() == keys[1:]
        assert metrics.snapshot()[EVICTIONS] == 1


def test_without_eviction_nothing_goes(make_pool):
    pool = make_pool(2)
    put(pool, pool, make_keys(2))
    assert take(pool, eviction=False, busy_loop=False) is None
    assert len(pool) == 2


def test_nothing_is_evicted_in_vain(make_pool):
    """Two of four chunks are held: a batch of three cannot be had, so the other two stay."""
    pool = make_pool(4)
    keys = make_keys(4)
    put(pool, pool, keys)
    with References(pool.batched_get_blocking(keys[:2])):
        assert take(pool, 3, busy_loop=False) is None
        assert len(pool) == 4
        with References(take(pool, 2, busy_loop=False)):
            assert sorted(pool.keys()) == sorted(keys[:2])


def test_protected_chunks_are_not_evicted(make_pool):
    pool = make_pool(3)
    keys = make_keys(3)
    put(pool, pool, keys)
    assert take(pool, 3, busy_loop=False, protect=[keys[1], make_key("nowhere")]) is None
    with References(take(pool, 2, busy_loop=False, protect=keys[1:2])):
        assert pool.keys() == keys[1:2]


@pytest.mark.parametrize("hold", ["reference", "pin"])
def test_what_is_held_is_never_evicted_or_reused(make_pool, hold):
    """Fault 15: a reader's memory is not the next owner's. Spec 5.6."""
    pool = make_pool(2)
    keys = make_keys(2)
    put(pool, pool, keys)
    held = References()
    pins = lease()
    if hold == "pin":
        assert pool.contains(keys[0], pin=pins)
    else:
        held.adopt(pool.batched_get_blocking(keys[:1]))
    with References(take(pool, busy_loop=False)) as objs:
        objs.objects[0].array[:] = 255
        assert pool.keys() == [keys[0]]
        assert take(pool, busy_loop=False) is None
        assert check_found(keys[:1], pool.batched_get_blocking(keys[:1])) == [True]
    held.release()
    pins.release()


def test_a_pin_outlives_removal_and_a_reader_outlives_the_pool(make_pool):
    """Fault 12: a chunk is one object, so no layer of it can be freed under a reader."""
    pool = make_pool(1)
    key = make_key("chunk")
    put(pool, pool, [key])
    pins = lease()
    assert pool.contains(key, pin=pins)
    assert pool.remove(key)
    assert take(pool, busy_loop=False) is None
    assert check_found([key], [pins.get(key)]) == [True]
    pins.release()
    with References(take(pool, busy_loop=False)):
        pass


def test_a_batch_that_can_never_fit_is_refused_at_once(make_pool):
    """Fault 25: also with busy_loop; nothing is evicted for it."""
    pool = make_pool(4, alloc_timeout_s=3600.0)
    put(pool, pool, make_keys(4))
    assert take(pool, 5) is None
    assert pool.batched_allocate((CHUNK_BYTES + 64,), torch.uint8, 1, FMT) is None
    assert pool.allocate((CHUNK_BYTES + 64,), torch.uint8, FMT) is None
    assert len(pool) == 4


def test_a_store_never_waits(make_pool):
    """Fault 25: everything is pinned and busy_loop is False."""
    pool = make_pool(1, alloc_timeout_s=3600.0)
    put(pool, pool, make_keys(1))
    with References(pool.batched_get_blocking(make_keys(1))):
        assert take(pool, busy_loop=False) is None


def test_a_load_stops_waiting_at_its_deadline(make_pool):
    """Fault 25: nothing is ever released."""
    pool = make_pool(1, alloc_timeout_s=0.05)
    put(pool, pool, make_keys(1))
    with References(pool.batched_get_blocking(make_keys(1))):
        assert take(pool) is None


def test_allocation_ends_when_caching_is_off(make_pool):
    """Fault 25: with the cache switched off there is nothing to evict, ever."""
    pool = make_pool(1, use_hot_cache=False, alloc_timeout_s=0.05)
    with References(fill(pool, make_keys(1))) as objs:
        assert pool.batched_submit_put_task(make_keys(1), objs.objects) == [PutOutcome.DROPPED]
        assert not pool.contains(make_key(0))
        assert take(pool) is None


@pytest.mark.parametrize("hold", ["reference", "pin", "free"])
def test_a_waiting_load_is_woken_by_a_release(make_pool, hold):
    pool = make_pool(1, alloc_timeout_s=30.0)
    key = make_key("held")
    if hold == "free":
        held = References(take(pool))
        release = held.release
    else:
        put(pool, pool, [key])
        if hold == "pin":
            pins = lease()
            assert pool.contains(key, pin=pins)
            release = pins.release
        else:
            held = References(pool.batched_get_blocking([key]))
            release = held.release
    results = []
    thread = threading.Thread(target=lambda: results.append(take(pool)))
    thread.start()
    release()
    thread.join(20)
    assert not thread.is_alive()
    References(results[0]).release()
    assert not pool.contains(key)


def test_two_loads_never_hold_half_each(make_pool):
    """Fault 26: two loads that want three of four slots get them one after the other."""
    pool = make_pool(4, alloc_timeout_s=30.0)
    rounds = [0, 0]
    most = []
    together = threading.Barrier(2)

    def load(number):
        together.wait()
        for _ in range(50):
            objs = take(pool, 3)
            most.append(pool.memcheck().num_objects)
            References(objs).release()
            rounds[number] += 1

    threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert rounds == [50, 50]
    assert set(most) == {3}


def test_two_waiting_loads_do_not_wake_each_other(make_pool):
    """Fault 26: a load that waits has taken nothing, so it gives nothing back either."""
    pool = make_pool(4, alloc_timeout_s=0.3)
    with References(take(pool, 2)):
        before = pool.allocator.release_count
        results = []
        threads = [threading.Thread(target=lambda: results.append(take(pool, 3))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert results == [None, None]
        assert pool.allocator.release_count == before


def test_before_evict_makes_room_when_nothing_can_be_evicted(make_pool):
    pool = make_pool(1)
    key = make_key("pinned")
    put(pool, pool, [key])
    pins = lease()
    assert pool.contains(key, pin=pins)
    given = []

    def reap():
        given.append(len(pins))
        pins.release()
        return given[-1]

    pool.before_evict = reap
    with References(take(pool, busy_loop=False)):
        assert given == [1]
    assert len(pool) == 0


def test_no_lock_is_held_while_an_allocation_waits(make_pool):
    """Fault 30: others are served meanwhile."""
    pool = make_pool(2, alloc_timeout_s=30.0)
    keys = make_keys(2)
    put(pool, pool, keys)
    held = References(pool.batched_get_blocking(keys))
    entered = threading.Event()
    pool.before_evict = lambda: entered.set()
    results = []
    thread = threading.Thread(target=lambda: results.append(take(pool)))
    thread.start()
    assert entered.wait(20)
    assert pool.batched_contains(keys) == 2
    assert check_found(keys, pool.batched_get_blocking(keys)) == [True, True]
    assert pool.remove(keys[1])
    held.release()
    thread.join(20)
    References(results[0]).release()


def test_suffixes_go_before_their_prefix(make_pool):
    """Spec 5.5: a use is noted in reverse, whoever notes it."""
    pool = make_pool(8)
    old, new = make_keys(4), make_keys(4, first=4)
    put(pool, pool, new)
    put(pool, pool, old)
    pins = lease()
    assert pool.batched_contains(new, pin=pins) == 4
    pins.release()
    assert pool.keys() == [*old[::-1], *new[::-1]]
    References(pool.batched_get_blocking(old)).release()
    assert pool.keys() == [*new[::-1], *old[::-1]]
    pool.touch_cache([*new, make_key("nowhere")])
    assert pool.keys() == [*old[::-1], *new[::-1]]
    with References(take(pool, 5)):
        assert pool.keys() == new[2::-1]


def test_contains_without_a_pin_is_no_use(make_pool):
    pool = make_pool(4)
    keys = make_keys(4)
    put(pool, pool, keys)
    assert pool.contains(keys[3])
    assert pool.batched_contains(keys) == 4
    assert pool.keys() == keys[::-1]


def test_a_use_is_not_noted_for_another_chunk_of_the_same_name(make_pool):
    """A lease knows objects, not keys: what was removed and stored anew was not used."""
    pool = make_pool(4)
    keys = make_keys(2)
    put(pool, pool, keys[:1])
    pins = lease()
    assert pool.contains(keys[0], pin=pins)
    pool.remove(keys[0])
    put(pool, pool, keys[:1])
    put(pool, pool, keys[1:])
    pins.release()
    assert pool.keys() == keys


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_lease_can_end_while_the_lock_is_held(make_pool, policy):
    """The garbage collector may drop a generator, and its lease, in the middle of a call."""
    pool = make_pool(4, policy)
    keys = make_keys(4)
    put(pool, pool, keys)
    pins = lease()
    assert pool.batched_contains(keys[1:2], pin=pins) == 1
    with pool._lock:
        pins.release()
    with References(take(pool, 3, busy_loop=False)):
        kept = {"mru": keys[3:], "fifo": keys[:1]}
        assert pool.keys() == kept.get(policy, keys[1:2])


def test_outcomes_of_a_put_that_fails_are_never_visible(make_pool):
    """Fault 4: an object that was given back already makes the whole put fail."""
    pool = make_pool(4)
    keys = make_keys(3)
    objs = fill(pool, keys)
    objs[1].ref_count_down()
    with pytest.raises(OwnershipError):
        pool.batched_submit_put_task(keys, objs)
    assert pool.keys() == []
    References([objs[0], objs[2]]).release()


def test_events_are_told_without_a_lock(make_pool):
    events = []

    def notify(event, key):
        assert not pool._lock.locked()
        events.append((event, key))

    pool = make_pool(2, notify=notify)
    keys = make_keys(3)
    put(pool, pool, keys[:2])
    put(pool, pool, keys[2:])
    pool.remove(keys[0])
    pool.clear()
    assert events == [
        ("ADMIT", keys[0]),
        ("ADMIT", keys[1]),
        ("EVICT", keys[1]),
        ("ADMIT", keys[2]),
        ("EVICT", keys[0]),
        ("EVICT", keys[2]),
    ]


def test_a_general_pool_evicts_until_there_is_enough(make_pool):
    pool = make_pool(8, chunk_bytes=None)
    keys = make_keys(8)
    put(pool, pool, keys)
    big = pool.batched_allocate((3 * CHUNK_BYTES,), torch.uint8, 2, FMT, busy_loop=False)
    assert sorted(pool.keys()) == sorted(keys[:2])
    References(big).release()


def test_a_closed_pool_answers_at_once(make_pool):
    pool = make_pool(2, alloc_timeout_s=3600.0)
    put(pool, pool, make_keys(2))
    held = References(pool.batched_get_blocking(make_keys(2)))
    results = []
    thread = threading.Thread(target=lambda: results.append(take(pool)))
    thread.start()
    pool.close()
    thread.join(20)
    assert results == [None]
    assert take(pool) is None
    assert pool.keys() == []
    held.release()
