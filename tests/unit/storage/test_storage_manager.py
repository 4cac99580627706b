"""StorageManager over a pool and in-memory tiers below it."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvkeep.backends.base import PutOutcome
from kvkeep.backends.reference import DictBackend
from kvkeep.hashing import split_layers
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.metrics import Metrics
from kvkeep.prefix import LocatedRun
from kvkeep.storage.manager import StorageManager
from kvkeep.testing.chunks import (
    DTYPE,
    SHAPE,
    bytes_of,
    check_found,
    fill,
    make_key,
    make_keys,
    make_pool,
)
from support.storage import open_storage, store

L1, L2, L3 = "LocalCPUBackend", "DictBackend", "far"
FMT = MemoryFormat.OPAQUE_PAGES
STORED, PRESENT = PutOutcome.STORED, PutOutcome.PRESENT


def one_below(pool):
    return [DictBackend(pool)]


def two_below(pool):
    return [DictBackend(pool), DictBackend(pool, name=L3)]


def own_memory(pool):
    """A tier whose allocator backend is another one."""
    return [DictBackend(make_pool(3), name=L3)]


def only_in(manager, keys, *names):
    """Leave chunks in these tiers alone."""
    manager.batched_remove(keys, [name for name in manager.storage_backends if name not in names])


def test_order_is_priority():
    with open_storage(two_below) as manager:
        assert list(manager.storage_backends) == [L1, L2, L3]


def test_names_must_differ():
    pool = make_pool(1)
    with pytest.raises(ValueError, match="repeat"):
        StorageManager([pool, pool], allocator_backend=pool, metrics=Metrics())
    pool.close()


def test_put_goes_to_every_tier_and_gives_the_references_back():
    with open_storage(two_below) as manager:
        keys = make_keys(3)
        assert store(manager, keys[:1]) == {name: [STORED] for name in (L1, L2, L3)}
        outcomes = [PRESENT, STORED, STORED]
        assert store(manager, keys) == {name: outcomes for name in (L1, L2, L3)}
        for name in (L1, L2, L3):
            assert check_found(keys, manager.batched_get(keys, name)) == [True] * 3


def test_put_into_one_tier():
    with open_storage(two_below) as manager:
        keys = make_keys(2)
        objs = fill(manager.allocator_backend, keys)
        assert manager.batched_put(keys, objs, location=L2) == {L2: [STORED, STORED]}
        assert manager.contains(keys[0]) == L2


def test_put_consumes_the_references_also_when_the_caller_is_wrong():
    """Fault 18: nothing leaks."""
    with open_storage(one_below) as manager:
        keys = make_keys(2)
        with pytest.raises(ValueError, match="2 keys for 1"):
            manager.batched_put(keys, fill(manager.allocator_backend, keys[:1]))
        with pytest.raises(ValueError, match="LocalCPUBackend, DictBackend"):
            manager.batched_put(
                keys, fill(manager.allocator_backend, keys), location="LocalDiskBackend"
            )
        assert manager.batched_put([], []) == {}


def test_put_of_a_single_object_names_batched_put():
    with open_storage() as manager:
        [obj] = fill(manager.allocator_backend, make_keys(1))
        with pytest.raises(RuntimeError, match="batched_put"):
            manager.put(make_key(0), obj)
        obj.ref_count_down()


def test_a_tier_with_memory_of_its_own_gets_copies():
    with open_storage(own_memory) as manager:
        keys = make_keys(4)
        outcomes = store(manager, keys)[L3]
        assert outcomes == [STORED, STORED, STORED, PutOutcome.NO_ROOM]
        far = manager.storage_backends[L3]
        other = far.get_allocator_backend()
        assert other.memcheck().num_objects == 0
        only_in(manager, keys, L3)
        objs = manager.batched_get(keys, L3)
        assert check_found(keys, objs) == [True, True, True, False]
        assert other.memcheck().num_objects == 0
        assert check_found(keys, manager.batched_get(keys, L1)) == [True, True, True, False]
        snapshot = manager.metrics.snapshot()
        assert snapshot['kvkeep_dropped_chunks_total{tier="far",cause="no_room"}'] == 1
        other.close()


def test_copies_are_as_many_as_fit():
    with open_storage() as manager:
        other = make_pool(2)
        with References(fill(manager.allocator_backend, make_keys(3))) as held:
            copies = manager.allocate_and_copy_objects(other, held.objects)
            assert check_found(make_keys(2), copies) == [True, True]
        assert other.memcheck().num_objects == 0
        other.close()


def test_lookups_return_to_earlier_tiers():
    """Spec 4.6: the run goes on in an earlier tier where a later one's ends."""
    with open_storage(two_below, capacity=16) as manager:
        keys = make_keys(8)
        store(manager, keys)
        only_in(manager, keys[:2], L1)
        only_in(manager, keys[2:4], L3)
        only_in(manager, keys[4:6], L2)
        only_in(manager, keys[6:7], L1, L3)
        only_in(manager, keys[7:])
        runs = [LocatedRun(L1, 0, 2), LocatedRun(L3, 2, 4), LocatedRun(L2, 4, 6)]
        runs.append(LocatedRun(L1, 6, 7))
        assert manager.get_block_mapping(keys) == runs
        assert manager.batched_contains(keys) == 7
        assert manager.batched_contains(keys, [L2, L3]) == 0
        assert manager.batched_contains(keys[2:], [L2, L3]) == 5
        assert manager.contains(keys[6], [L3]) == L3
        assert manager.contains(keys[7]) is None
        with pytest.raises(ValueError, match="elsewhere"):
            manager.batched_contains(keys, ["elsewhere"])


def test_a_pinned_lookup_holds_over_all_tiers():
    """Spec 1.16: nothing that was found can go before the lease ends."""
    with open_storage(one_below, capacity=8) as manager:
        keys = make_keys(4)
        store(manager, keys)
        only_in(manager, keys[:2], L1)
        only_in(manager, keys[2:], L2)
        lease = manager.leases.open("one")
        assert manager.batched_contains([*keys, make_key("x")], pin=lease) == 4
        manager.leases.keep("one", lease)
        manager.clear()
        assert manager.batched_contains(keys) == 0
        with References(manager.allocate_prefix(SHAPE, DTYPE, 8, FMT)) as rest:
            assert len(rest.objects) == 4
        lease = manager.leases.claim("one")
        assert check_found(keys, [lease.get(key) for key in keys]) == [True] * 4
        lease.release()
        assert not manager.batched_unpin("one")


def test_what_comes_from_below_is_written_back():
    """Spec 4.5: every chunk that arrived, also when others did not."""
    with open_storage(one_below) as manager:
        keys = make_keys(4)
        store(manager, keys)
        only_in(manager, keys, L2)
        manager.remove(keys[1])
        found = check_found(keys, manager.batched_get(keys, L2))
        assert found == [True, False, True, True]
        assert check_found(keys, manager.batched_get(keys, L1)) == found
        assert manager.contains(keys[0]) == L1


def test_get_asks_the_tiers_in_order():
    with open_storage(two_below) as manager:
        keys = make_keys(2)
        store(manager, keys)
        only_in(manager, keys, L3)
        assert check_found(keys[:1], [manager.get(keys[0])]) == [True]
        assert manager.contains(keys[0]) == L1
        assert manager.get(make_key("nowhere")) is None


def layers_of(keys, num_layers=3):
    """Names of the layers, layer by layer."""
    return list(zip(*[split_layers(key, num_layers) for key in keys], strict=True))


@pytest.mark.parametrize("location", [L1, L2])
def test_layerwise_get_yields_a_future_per_layer(location):
    """One reference per chunk in total, whatever the number of layers."""
    with open_storage(one_below) as manager:
        keys = make_keys(4)
        store(manager, keys[:3])
        only_in(manager, keys, location)
        futures = list(manager.layerwise_batched_get(layers_of(keys), location))
        assert len(futures) == 3
        answers = [future.result(20) for future in futures]
        assert answers[1] == answers[0] == answers[2]
        assert check_found(keys, answers[0]) == [True, True, True, False]
        assert manager.contains(keys[0]) == L1


def test_layerwise_get_corner_cases():
    """Fault 19: a generator that is dropped before its first future holds nothing."""
    with open_storage(one_below) as manager:
        keys = make_keys(2)
        store(manager, keys)
        assert list(manager.layerwise_batched_get([], L1)) == []
        empty = [future.result(0) for future in manager.layerwise_batched_get([[], []], L1)]
        assert empty == [[], []]
        manager.layerwise_batched_get(layers_of(keys), L1).close()
        dropped = manager.layerwise_batched_get(layers_of(keys), L1)
        first = next(dropped)
        dropped.close()
        assert not first.cancel()
        assert check_found(keys, first.result(20)) == [True, True]
        with pytest.raises(ValueError, match="layer"):
            next(manager.layerwise_batched_get([layers_of(keys)[0], []], L1))
        with pytest.raises(ValueError, match="elsewhere"):
            next(manager.layerwise_batched_get(layers_of(keys), "elsewhere"))


def test_remove_and_clear_count_copies():
    with open_storage(two_below) as manager:
        keys = make_keys(3)
        store(manager, keys)
        assert manager.remove(keys[0], [L2]) == 1
        assert manager.remove(keys[0]) == 2
        assert manager.batched_remove(keys, [L1, L3]) == 4
        assert manager.contains(keys[1]) == L2
        assert manager.clear([L1]) == 0
        assert manager.clear() == 2


def test_frozen_reads_the_pool_and_puts_nothing():
    """Spec 1.10."""
    with open_storage(one_below) as manager:
        keys = make_keys(4)
        store(manager, keys[:3])
        only_in(manager, keys[2:3], L2)
        manager.set_frozen(True)
        assert manager.is_frozen()
        assert store(manager, keys[3:]) == {}
        assert manager.batched_contains(keys) == 2
        assert manager.contains(keys[2]) is None
        assert manager.get(keys[2]) is None
        assert manager.batched_get(keys[2:3], L2) == [None]
        [future] = manager.layerwise_batched_get(layers_of(keys[2:3], 1), L2)
        assert future.result(0) == [None]
        assert check_found(keys[:2], manager.batched_get(keys[:2], L1)) == [True, True]
        manager.set_frozen(False)
        assert manager.contains(keys[2]) == L2
        assert manager.contains(keys[3]) is None


def test_a_bypassed_tier_is_left_out_everywhere():
    """Spec 4.10."""
    with open_storage(one_below) as manager:
        keys = make_keys(3)
        store(manager, keys[:2])
        only_in(manager, keys[1:2], L2)
        manager.set_bypassed(L2, True)
        assert manager.bypassed == {L2}
        assert store(manager, keys[2:]) == {L1: [STORED]}
        assert manager.batched_contains(keys) == 1
        assert manager.batched_get(keys[1:2], L2) == [None]
        [future] = manager.layerwise_batched_get(layers_of(keys[1:2], 1), L2)
        assert future.result(0) == [None]
        assert manager.get(keys[1]) is None
        assert manager.remove(keys[1]) == 0
        manager.set_bypassed(L2, False)
        assert manager.contains(keys[1]) == L2
        with pytest.raises(ValueError, match="no tier is called"):
            manager.set_bypassed("elsewhere", True)


def test_a_bypassed_pool_still_hands_out_memory():
    with open_storage(one_below) as manager:
        keys = make_keys(2)
        store(manager, keys)
        manager.set_bypassed(L1, True)
        assert manager.contains(keys[0]) == L2
        assert check_found(keys, manager.batched_get(keys, L2)) == [True, True]
        manager.set_bypassed(L1, False)


def test_touching_makes_a_prefix_outlive_its_suffix():
    with open_storage(one_below, capacity=6) as manager:
        keys = make_keys(6)
        for key in keys:
            store(manager, [key])
        manager.touch_cache(keys[:4])
        manager.touch_cache(keys[4:], L1)
        with References(manager.allocate_prefix(SHAPE, DTYPE, 3, FMT)):
            assert sorted(manager.storage_backends[L1].keys()) == sorted([keys[0], *keys[4:]])


def test_allocate_prefix_takes_what_there_is():
    """Spec 1.9: a pool smaller than the prompt keeps the prefix that fits, for every size."""
    for wanted in range(12):
        with open_storage(capacity=7) as manager:
            store(manager, make_keys(2))
            with References(manager.allocate_prefix(SHAPE, DTYPE, wanted, FMT)) as objs:
                assert len(objs.objects) == min(wanted, 7)
                assert len(manager.storage_backends[L1].keys()) == max(0, min(2, 7 - wanted))


@pytest.mark.parametrize("seed", range(20))
def test_allocate_prefix_evicts_as_little_as_needed(seed):
    """And never a chunk of the same prompt, nor one that is held."""
    chance = random.Random(seed)
    capacity = chance.randrange(1, 40)
    with open_storage(capacity=capacity) as manager:
        pool = manager.allocator_backend
        keys = make_keys(chance.randrange(capacity + 1))
        store(manager, keys)
        protect = chance.sample(keys, chance.randrange(len(keys) + 1))
        held_keys = chance.sample(keys, chance.randrange(len(keys) + 1))
        wanted = chance.randrange(capacity + 5)
        stays = {*protect, *held_keys}
        with References(manager.batched_get(held_keys, L1)):
            objs = manager.allocate_prefix(SHAPE, DTYPE, wanted, FMT, protect=protect)
            with References(objs):
                assert len(objs) == min(wanted, capacity - len(stays))
                assert stays <= set(pool.keys())
                assert len(pool) == min(len(keys), capacity - len(objs))


def test_a_shape_without_a_size_is_a_mistake():
    with open_storage() as manager:
        for shape in [(), (0, 3), (-1,)]:
            with pytest.raises(ValueError, match="cannot allocate"):
                manager.batched_allocate(shape, DTYPE, 1, FMT)
        with pytest.raises(ValueError, match="cannot allocate"):
            manager.batched_allocate(SHAPE, DTYPE, -1, FMT)
        obj = manager.allocate(SHAPE, DTYPE, FMT)
        assert obj.metadata.shape == SHAPE
        obj.ref_count_down()


def test_an_expired_lease_gives_its_memory_to_who_needs_it():
    """Fault 17: without a timer and without a further lookup."""
    with open_storage(capacity=2, lease_timeout_s=10.0) as manager:
        now = [0.0]
        manager.leases._clock = lambda: now[0]
        keys = make_keys(2)
        store(manager, keys)
        lease = manager.leases.open("gone")
        assert manager.batched_contains(keys, pin=lease) == 2
        manager.leases.keep("gone", lease)
        assert manager.allocate_prefix(SHAPE, DTYPE, 2, FMT) == []
        now[0] = 10.0
        with References(manager.allocate_prefix(SHAPE, DTYPE, 2, FMT)) as objs:
            assert len(objs.objects) == 2
        assert manager.metrics.snapshot()["kvkeep_leases_expired_total"] == 1


def test_keys_of_models_with_paths_do_not_collide():
    """Fault 16: "a/b" and "a-b" are two models; a long name makes no long key."""
    from kvkeep.identity import CacheIdentity
    from kvkeep.layout import GroupLayout, KVLayout
    from kvkeep.tokens import ChunkedTokenDatabase

    layout = KVLayout(
        MemoryFormat.OPAQUE_PAGES, "uint8", 4, (GroupLayout("full", 1, 64),), 0, 0, "x"
    )
    models = ["a/b", "a-b", "a_b", "a", "a/b/", "../a", "a\0b", "x" * 5000]
    keys = [
        ChunkedTokenDatabase(CacheIdentity(model, "1", layout, chunk_size=4))
        .process_tokens([1, 2, 3, 4])
        .keys[0]
        for model in models
    ]
    assert {len(key) for key in keys} == {32}
    with open_storage(one_below) as manager:
        for number, key in enumerate(keys):
            assert manager.contains(key) is None
            assert number == len(manager.storage_backends[L1].keys())
            store(manager, [key])
        assert check_found(keys, manager.batched_get(keys, L2)) == [True] * len(models)


def test_threads_over_a_pool_that_is_too_small():
    """Eight threads store, look up, load and remove over two tiers; evictions never stop."""
    keys = make_keys(24)
    finished = []

    def work(manager, number):
        chance = random.Random(number)
        for step in range(60):
            lookup_id = f"{number}-{step}"
            start = chance.randrange(len(keys))
            prompt = keys[start : start + chance.randrange(1, 8)]
            lease = manager.leases.open(lookup_id)
            found = manager.batched_contains(prompt, pin=lease)
            manager.leases.keep(lookup_id, lease)
            missing = prompt[found:]
            objs = manager.allocate_prefix(SHAPE, DTYPE, len(missing), FMT, protect=prompt)
            for key, obj in zip(missing, objs, strict=False):
                obj.array[:] = np.frombuffer(bytes_of(key), np.uint8)
            manager.batched_put(missing[: len(objs)], objs)
            lease = manager.leases.claim(lookup_id)
            held = check_found(prompt, [lease.get(key) for key in prompt])
            assert held == [True] * found + [False] * len(missing)
            lease.release()
            for run in manager.get_block_mapping(prompt):
                part = prompt[run.start : run.end]
                check_found(part, manager.batched_get(part, run.location))
            if chance.random() < 0.2:
                manager.batched_remove(prompt[:2], [chance.choice([L1, L2])])
        finished.append(number)

    with open_storage(one_below, capacity=10) as manager:
        manager.allocator_backend._alloc_timeout_s = 0.02
        threads = [threading.Thread(target=work, args=(manager, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sorted(finished) == list(range(8))
        snapshot = manager.metrics.snapshot()
        assert snapshot['kvkeep_evictions_total{tier="LocalCPUBackend"}'] > 100
        assert not any(name.startswith("kvkeep_failures_total") for name in snapshot)
