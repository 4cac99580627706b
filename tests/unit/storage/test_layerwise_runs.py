"""layerwise_batched_get over several tiers: what get_block_mapping answered, in one future."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from kvkeep.backends.reference import DictBackend
from kvkeep.hashing import split_layers
from kvkeep.memory.base import References
from kvkeep.prefix import LocatedRun
from kvkeep.testing.chunks import check_found, fill, make_keys
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend
from support.storage import open_storage, store

L1, L2, L3 = "LocalCPUBackend", "L2", "L3"


def two_below(pool):
    return [DictBackend(pool, name=L2), DictBackend(pool, name=L3)]


def leave_in(manager, keys, tier):
    manager.batched_remove(keys, [name for name in manager.storage_backends if name != tier])


def layers_of(keys, num_layers=3):
    return list(zip(*[split_layers(key, num_layers) for key in keys], strict=True))


def spread(manager, keys):
    """Chunks 0 and 1 in the pool, 2 in L2, 3 and 4 in L3, the rest in the pool again."""
    store(manager, keys)
    for part, tier in [(keys[:2], L1), (keys[2:3], L2), (keys[3:5], L3), (keys[5:], L1)]:
        leave_in(manager, part, tier)
    runs = manager.get_block_mapping(keys)
    assert [(run.location, run.start, run.end) for run in runs] == [
        (L1, 0, 2),
        (L2, 2, 3),
        (L3, 3, 5),
        (L1, 5, 7),
    ]
    return runs


def test_one_prefix_over_several_tiers():
    """Position by position, one reference per chunk, and all of it in the pool afterwards."""
    with open_storage(two_below) as manager:
        keys = make_keys(7)
        runs = spread(manager, keys)
        futures = list(manager.layerwise_batched_get(layers_of(keys), runs))
        assert len(futures) == 3
        assert futures[0].result(20) == futures[2].result(20)
        assert check_found(keys, futures[0].result(20)) == [True] * 7
        assert manager.batched_contains(keys, [L1]) == 7


def test_chunks_after_the_last_run_are_misses():
    with open_storage(two_below) as manager:
        keys = make_keys(9)
        runs = spread(manager, keys[:7])
        [future] = manager.layerwise_batched_get(layers_of(keys, 1), runs)
        assert check_found(keys, future.result(20)) == [True] * 7 + [False] * 2
        [future] = manager.layerwise_batched_get(layers_of(keys, 1), [])
        assert future.result(0) == [None] * 9
        with pytest.raises(ValueError, match="elsewhere"):
            next(manager.layerwise_batched_get(layers_of(keys), [LocatedRun("elsewhere", 0, 1)]))


@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.SHORT, FaultKind.LONG])
def test_a_tier_that_fails_is_a_gap_and_no_more(kind):
    """Fault 1: the other tiers' chunks keep their positions."""

    def tiers(pool):
        return [
            FaultyBackend(DictBackend(pool, name=L2), [Fault("get", kind)]),
            DictBackend(pool, name=L3),
        ]

    with open_storage(tiers) as manager:
        keys = make_keys(7)
        runs = spread(manager, keys)
        [future] = manager.layerwise_batched_get(layers_of(keys, 1), runs)
        expected = [True, True, False, True, True, True, True]
        assert check_found(keys, future.result(20)) == expected


def test_frozen_only_the_pool_is_read():
    """Spec 1.10, also when the runs were located before."""
    with open_storage(two_below) as manager:
        keys = make_keys(7)
        runs = spread(manager, keys)
        manager.set_frozen(True)
        [future] = manager.layerwise_batched_get(layers_of(keys, 1), runs)
        expected = [True, True, False, False, False, True, True]
        assert check_found(keys, future.result(0)) == expected
        manager.set_frozen(False)


def test_what_is_in_memory_is_held_before_room_is_made_for_the_rest():
    """A chunk of the same prefix is not evicted by the loading of an earlier one."""
    with open_storage(two_below, capacity=4) as manager:
        keys, others = make_keys(4), make_keys(2, 100)
        store(manager, keys[3:])
        store(manager, keys[1:3])
        leave_in(manager, keys[3:], L1)
        leave_in(manager, keys[1:3], L2)
        store(manager, others)
        store(manager, keys[:1])  # the pool is full, and keys[3] is the least recent in it
        runs = manager.get_block_mapping(keys)
        assert [run.location for run in runs] == [L1, L2, L1]
        [future] = manager.layerwise_batched_get(layers_of(keys, 1), runs)
        assert check_found(keys, future.result(20)) == [True] * 4


class LateBackend(DictBackend):
    """Answers non-blocking gets from a thread of its own, when it is told to."""

    def __init__(self, pool):
        super().__init__(pool, name=L2)
        self.go = threading.Event()
        self.threads = []

    def batched_get_non_blocking(self, keys):
        future = Future()

        def answer():
            assert self.go.wait(20)
            future.set_result(self.batched_get_blocking(keys))

        self.threads.append(threading.Thread(target=answer))
        self.threads[-1].start()
        return future


def test_tiers_are_asked_at_once_and_the_last_answer_completes_it():
    with open_storage(lambda pool: [LateBackend(pool), DictBackend(pool, name=L3)]) as manager:
        keys = make_keys(7)
        runs = spread(manager, keys)
        late = manager.storage_backends[L2]
        layers = manager.layerwise_batched_get(layers_of(keys), runs)
        first = next(layers)
        assert not first.done()
        assert manager.contains(keys[3], [L1]) == L1  # the tier after it has answered already
        layers.close()
        late.go.set()
        assert check_found(keys, first.result(20)) == [True] * 7
        late.threads[0].join(20)


def test_a_full_pool_makes_misses_of_what_does_not_fit():
    with open_storage(two_below, capacity=8) as manager:
        keys = make_keys(7)
        runs = spread(manager, keys)
        with References(fill(manager.allocator_backend, make_keys(4, 200))):
            manager.allocator_backend._alloc_timeout_s = 0.01
            [future] = manager.layerwise_batched_get(layers_of(keys, 1), runs)
            found = check_found(keys, future.result(20))
        assert found[:2] == found[5:] == [True, True]
        assert not all(found)
