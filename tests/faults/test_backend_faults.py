"""A tier that fails, stalls or lies: the others go on, nothing leaks, no byte is ever wrong."""

from __future__ import annotations

import logging
import random
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from kvkeep.backends.base import PutOutcome
from kvkeep.backends.reference import DictBackend
from kvkeep.errors import BackendTimeoutError
from kvkeep.hashing import split_layers
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.storage.health import HealthMonitor
from kvkeep.testing.chunks import DTYPE, SHAPE, bytes_of, check_found, make_keys
from kvkeep.testing.faulty import Fault, FaultKind, FaultyAllocatorBackend, FaultyBackend
from support.storage import open_storage, store

L1, L2, L3 = "LocalCPUBackend", "DictBackend", "far"
FMT = MemoryFormat.OPAQUE_PAGES
STORED = PutOutcome.STORED
RAISING = (FaultKind.RAISE, FaultKind.RAISE_AFTER)
LYING = (FaultKind.SHORT, FaultKind.LONG)


def faulty_l2(*faults):
    """Between the pool and a healthy third tier."""
    return lambda pool: [FaultyBackend(DictBackend(pool), faults), DictBackend(pool, name=L3)]


def failures(manager, operation, tier=L2):
    name = f'kvkeep_failures_total{{tier="{tier}",operation="{operation}"'
    return {
        key.rpartition('cause="')[2].rstrip('"}'): value
        for key, value in manager.metrics.snapshot().items()
        if key.startswith(name)
    }


def leave_in(manager, keys, tier):
    manager.batched_remove(keys, [name for name in manager.storage_backends if name != tier])


def layers_of(keys, num_layers=3):
    return list(zip(*[split_layers(key, num_layers) for key in keys], strict=True))


@pytest.mark.parametrize("kind", [*RAISING, *LYING])
def test_a_put_that_fails_does_not_keep_the_data_from_the_others(kind):
    """Fault 2, 4 and 18: counted, the references given back, what is visible is right."""
    with open_storage(faulty_l2(Fault("put", kind, count=1))) as manager:
        keys = make_keys(4)
        assert store(manager, keys) == {L1: [STORED] * 4, L3: [STORED] * 4}
        cause = "BackendError" if kind in RAISING else "wrong_answer"
        assert failures(manager, "put") == {cause: 1}
        for tier in (L1, L3):
            assert check_found(keys, manager.batched_get(keys, tier)) == [True] * 4
        found = check_found(keys, manager.batched_get(keys, L2))
        if kind in RAISING:
            assert found == ([False] * 4 if kind is FaultKind.RAISE else [True, True, False, False])


def test_every_kind_of_exception_of_a_plugin_is_survived(caplog):
    """Fault 31: an assertion or a bug in a tier never reaches the engine; it is logged once."""
    errors = [AssertionError, RuntimeError, OSError, KeyError, ValueError, MemoryError]
    faults = [
        Fault("get", FaultKind.RAISE, number, 1, error=error) for number, error in enumerate(errors)
    ]
    with open_storage(faulty_l2(*faults, Fault("get", FaultKind.RAISE, 6))) as manager:
        keys = make_keys(1)
        store(manager, keys)
        with caplog.at_level(logging.WARNING):
            for _ in range(8):
                assert manager.batched_get(keys, L2) == [None]
        counted = failures(manager, "get")
        assert counted == {**{error.__name__: 1 for error in errors}, "BackendError": 2}
        assert len(caplog.records) == len(counted)


def test_a_call_that_ran_out_of_time_is_counted_as_such():
    class TooLateError(BackendTimeoutError):
        def __init__(self, message):
            super().__init__(message, backend=L2, operation="get")

    fault = Fault("get", FaultKind.RAISE, error=TooLateError)
    with open_storage(faulty_l2(fault)) as manager:
        assert manager.batched_get(make_keys(2), L2) == [None, None]
        assert failures(manager, "get") == {"timeout": 1}


@pytest.mark.parametrize("how", ["bulk", "layerwise"])
@pytest.mark.parametrize("kind", [*RAISING, *LYING])
def test_a_get_that_fails_is_a_miss_and_leaks_nothing(how, kind):
    """Fault 1: an answer of another length is never paired with the keys."""
    with open_storage(faulty_l2(Fault("get", kind, count=1))) as manager:
        keys = make_keys(4)
        store(manager, keys)
        leave_in(manager, keys, L2)
        manager.remove(keys[1])
        if how == "bulk":
            objs = manager.batched_get(keys, L2)
        else:
            futures = list(manager.layerwise_batched_get(layers_of(keys), L2))
            objs = futures[0].result(20)
            assert [future.result(0) for future in futures[1:]] == [objs, objs]
        assert objs == [None] * 4
        assert failures(manager, "get") == {
            "BackendError" if kind in RAISING else "wrong_answer": 1
        }
        assert manager.storage_backends[L1].keys() == []
        found = check_found(keys, manager.batched_get(keys, L2))
        assert found == [True, False, True, True]


@pytest.mark.parametrize("kind", [*RAISING, *LYING])
def test_a_lookup_that_fails_in_one_tier_asks_the_others(kind):
    """Fault 33; and pins that a failing lookup took end with its lease."""
    with open_storage(faulty_l2(Fault("contains", kind))) as manager:
        keys = make_keys(4)
        store(manager, keys)
        manager.batched_remove(keys[2:], [L1])
        lease = manager.leases.open("one")
        runs = manager.get_block_mapping(keys, pin=lease)
        assert [(run.location, run.start, run.end) for run in runs] == [(L1, 0, 2), (L3, 2, 4)]
        assert check_found(keys, [lease.get(key) for key in keys]) == [True] * 4
        manager.leases.keep("one", lease)
        assert manager.batched_unpin("one")
        assert failures(manager, "contains")


def test_a_chunk_that_vanishes_between_lookup_and_load_is_a_miss():
    """Fault 3: positions stay, the others are whole, nothing leaks."""
    with open_storage(faulty_l2(Fault("contains", FaultKind.DROP))) as manager:
        keys = make_keys(4)
        store(manager, keys)
        leave_in(manager, keys, L2)
        assert manager.batched_contains(keys) == 4
        manager.remove(keys[2], [L2])
        assert manager.batched_contains(keys) == 4
        found = check_found(keys, manager.batched_get(keys, L2))
        assert found == [True, True, False, True]
        assert sorted(manager.storage_backends[L1].keys()) == sorted([*keys[:2], keys[3]])


def test_a_put_that_lies_is_a_miss_later():
    """Fault 4: what says STORED and keeps nothing gives no bytes."""
    with open_storage(faulty_l2(Fault("put", FaultKind.DROP))) as manager:
        keys = make_keys(2)
        assert store(manager, keys)[L2] == [STORED] * 2
        leave_in(manager, keys, L2)
        assert manager.batched_contains(keys) == 0
        assert manager.batched_get(keys, L2) == [None, None]


@pytest.mark.parametrize("operation", ["remove", "clear", "health", "close"])
def test_housekeeping_goes_on_after_a_failure(operation):
    """Fault 33: one dead tier keeps nothing from the others."""
    with open_storage(faulty_l2(Fault(operation, FaultKind.RAISE))) as manager:
        keys = make_keys(2)
        store(manager, keys)
        if operation == "remove":
            assert manager.batched_remove(keys) == 4
        elif operation == "clear":
            assert manager.clear() == 4
        elif operation == "health":
            HealthMonitor(manager).check_once()
            assert manager.bypassed == {L2}
            assert manager.batched_contains(keys, [L1]) == 2
            assert manager.batched_contains(keys, [L2]) == 0
        far = manager.storage_backends[L3]
        counter = manager.metrics
    if operation == "close":
        assert not far.health().healthy
    name = f'kvkeep_failures_total{{tier="{L2}",operation="{operation}",cause="BackendError"}}'
    assert counter.snapshot()[name] >= 1


def test_an_allocation_that_fails_is_no_room():
    """Fault 18: the store goes on without; nothing that was taken before leaks."""
    faults = [Fault("allocate", FaultKind.DROP, 1, 1), Fault("allocate", FaultKind.RAISE, 3, 1)]
    with open_storage(wrap_pool=lambda pool: FaultyAllocatorBackend(pool, faults)) as manager:
        assert manager.batched_allocate(SHAPE, DTYPE, 9, FMT, busy_loop=False) is None
        with References(manager.allocate_prefix(SHAPE, DTYPE, 6, FMT)) as objs:
            # 6 are refused; 3 fit; of the other 3, a request fails, and 1, 1 and 1 fit.
            assert len(objs.objects) == 6
        assert failures(manager, "allocate", L1) == {"BackendError": 1}
        assert manager.batched_allocate(SHAPE, DTYPE, 9, FMT, busy_loop=False) is None


def test_no_lock_is_held_while_a_tier_stalls():
    """Fault 30: a slow get of one tier keeps nobody from the others, nor from the leases."""
    with open_storage(faulty_l2(Fault("get", FaultKind.DELAY, delay_s=30.0))) as manager:
        keys = make_keys(3)
        store(manager, keys)
        entered = threading.Event()
        slow = manager.storage_backends[L2]
        enter = slow._enter

        def watch(operation):
            entered.set()
            return enter(operation)

        slow._enter = watch
        answers = []
        thread = threading.Thread(target=lambda: answers.append(manager.batched_get(keys, L2)))
        thread.start()
        assert entered.wait(20)
        assert manager.batched_contains(keys) == 3
        assert check_found(keys, manager.batched_get(keys, L1)) == [True] * 3
        lease = manager.leases.open("one")
        assert manager.batched_contains(keys, pin=lease) == 3
        manager.leases.keep("one", lease)
        assert manager.batched_unpin("one")
        assert thread.is_alive()
        slow._closing.set()
        thread.join(20)
        assert check_found(keys, answers[0]) == [True] * 3


class LateBackend(DictBackend):
    """Answers a get when it is told to."""

    def __init__(self, pool):
        super().__init__(pool)
        self.pending = []

    def batched_get_non_blocking(self, keys):
        future = Future()
        self.pending.append((future, keys))
        return future


@pytest.mark.parametrize("end", ["answer", "error", "cancel", "short", "nonsense"])
def test_a_late_layerwise_answer(end):
    """Fault 20: every layer's future gets one answer, whatever becomes of the tier's own."""
    with open_storage(lambda pool: [LateBackend(pool)]) as manager:
        late = manager.storage_backends[L2]
        keys = make_keys(3)
        store(manager, keys)
        leave_in(manager, keys, L2)
        futures = list(manager.layerwise_batched_get(layers_of(keys), L2))
        assert not any(future.done() for future in futures)
        [(future, asked)] = late.pending
        if end == "answer":
            future.set_result(late.batched_get_blocking(asked))
        elif end == "error":
            future.set_exception(OSError("gone"))
        elif end == "cancel":
            assert future.cancel()
        elif end == "short":
            future.set_result(late.batched_get_blocking(asked[1:]))
        else:
            future.set_result(None)
        found = check_found(keys, futures[0].result(20))
        assert found == [end == "answer"] * 3
        assert all(future.done() for future in futures)
        assert bool(failures(manager, "get")) == (end != "answer")


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_give_misses_and_never_wrong_bytes(seed):
    """A pool too small, a second tier that fails at random, a third that works; 200 requests."""
    chance = random.Random(seed)
    kinds = [*RAISING, *LYING, FaultKind.DROP]
    faults = [
        Fault(operation, chance.choice(kinds), number, 1)
        for operation in ("put", "get", "contains", "remove")
        for number in range(400)
        if chance.random() < 0.3
    ]
    with open_storage(faulty_l2(*faults), capacity=5) as manager:
        keys = make_keys(12)
        for request in range(200):
            prompt = keys[: chance.randrange(1, 13)]
            lease = manager.leases.open(str(request))
            runs = manager.get_block_mapping(prompt, pin=lease)
            manager.leases.keep(str(request), lease)
            if chance.random() < 0.2:
                assert manager.batched_unpin(str(request))
                continue
            lease = manager.leases.claim(str(request))
            held = [lease.get(key) for key in prompt]
            check_found(prompt, held)
            lease.release()
            for run in runs:
                part = prompt[run.start : run.end]
                check_found(part, manager.batched_get(part, run.location))
            missing = prompt[runs[-1].end if runs else 0 :]
            objs = manager.allocate_prefix(SHAPE, DTYPE, len(missing), FMT, protect=prompt)
            for key, obj in zip(missing, objs, strict=False):
                obj.array[:] = np.frombuffer(bytes_of(key), np.uint8)
            manager.batched_put(missing[: len(objs)], objs)
            if chance.random() < 0.1:
                manager.batched_remove(chance.sample(keys, 3))
            assert len(manager.leases) == 0
