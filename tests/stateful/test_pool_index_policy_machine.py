"""Pool, index and policy together against a dict model, for every policy; bytes are checked."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvkeep.backends.base import Lease, PutOutcome
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.names import create_policy
from kvkeep.testing.chunks import CHUNK_BYTES, DTYPE, SHAPE, bytes_of, check_found, make_keys

CAPACITY = 6
KEYS = make_keys(10)
EVICTIONS = 'kvkeep_evictions_total{tier="LocalCPUBackend"}'

numbers = st.integers(0, len(KEYS) - 1)
batches = st.lists(numbers, min_size=1, max_size=4)
prefixes = st.tuples(numbers, st.integers(1, 5)).map(
    lambda pair: list(range(pair[0], min(len(KEYS), sum(pair))))
)


class Order:
    """The order of eviction by the naive definition: when each chunk came, was used, how often."""

    def __init__(self, policy):
        self.policy = policy
        self.entries: dict[int, list[int]] = {}
        self.counted_early: set[int] = set()
        self.time = 0

    def put(self, number):
        self.time += 1
        self.entries[number] = [self.time, self.time, 1]

    def use(self, batch):
        for number in reversed(batch):
            if number in self.entries:
                self.time += 1
                self.entries[number][1] = self.time
                self.entries[number][2] += number not in self.counted_early
                self.counted_early.discard(number)

    def forget(self, number):
        del self.entries[number]
        self.counted_early.discard(number)

    def set_aside(self, run):
        """Pinned chunks that a search met: they stand as far from its start as the policy lets."""
        for number in run:
            if self.policy == "lfu" and number in self.counted_early:
                continue
            self.time += 1
            if self.policy == "fifo":
                self.entries[number][0] = self.time
            else:
                self.entries[number][1] = -self.time if self.policy == "mru" else self.time
            if self.policy == "lfu":
                self.entries[number][2] += 1
                self.counted_early.add(number)

    def note(self, run):
        """A prompt: its later chunks shall go first."""
        here = [number for number in run if number in self.entries]
        if self.policy == "mru":
            self._use_at_once(here)
        elif self.policy == "fifo":
            self._arrive_in_order(here)
        else:
            self._use_at_once(reversed(here))
            most = 0
            for number in reversed(here):
                self.entries[number][2] = most = max(most, self.entries[number][2])

    def _use_at_once(self, numbers):
        for number in numbers:
            self.time += 1
            self.entries[number][1] = self.time

    def _arrive_in_order(self, here):
        for place, number in reversed(list(enumerate(here))):
            if any(self.entries[later][0] > self.entries[number][0] for later in here[place:]):
                self.time += 1
                self.entries[number][0] = self.time

    def ranked(self):
        rank = {
            "fifo": lambda entry: entry[0],
            "lru": lambda entry: entry[1],
            "mru": lambda entry: -entry[1],
            "lfu": lambda entry: (entry[2], entry[1]),
        }[self.policy]
        return sorted(self.entries, key=lambda number: rank(self.entries[number]))


class PoolMachine(RuleBasedStateMachine):
    """A pool of six slots, ten chunks, readers that hold references, and leases that pin."""

    policy = "lru"

    @initialize(first=st.permutations(range(len(KEYS))), count=st.integers(0, CAPACITY))
    def start(self, first, count):
        self.metrics = Metrics()
        allocator = initialize_allocator(CAPACITY * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
        policy = create_policy(self.policy)
        self.pool = LocalCPUBackend(allocator, policy, metrics=self.metrics)
        self.order = Order(self.policy)
        set_aside = policy.set_aside

        def watched(keys, mapping):
            assert all(mapping[key].is_pinned for key in keys)
            self.order.set_aside([KEYS.index(key) for key in keys])
            set_aside(keys, mapping)

        policy.set_aside = watched
        self.readers: list[tuple[list[int], References]] = []
        self.leases: list[tuple[list[int], Lease]] = []
        self.buffers: list[References] = []
        self.evicted = 0
        # Which object a number stands for: it changes when a chunk is removed and put again.
        self.generation = dict.fromkeys(range(len(KEYS)), 0)
        self.held: dict[tuple[int, int], int] = {}
        if count:
            self.put(first[:count])

    def _hold(self, batch, change):
        for number in batch:
            name = (number, self.generation[number])
            self.held[name] = self.held.get(name, 0) + change
            if not self.held[name]:
                del self.held[name]

    def _forget(self, number):
        self.order.forget(number)
        self.generation[number] += 1

    def _is_held(self, number):
        return (number, self.generation[number]) in self.held

    def _used_slots(self):
        gone = sum(1 for number, generation in self.held if self.generation[number] != generation)
        buffers = sum(len(buffer.objects) for buffer in self.buffers)
        return len(self.order.entries) + gone + buffers

    def _allocate(self, count, protect=()):
        """Allocate as the model says it must go: by the order, as little as needed, or not."""
        missing = count - (CAPACITY - self._used_slots())
        may_go = [
            number
            for number in self.order.ranked()
            if not self._is_held(number) and number not in protect
        ]
        objs = self.pool.batched_allocate(
            SHAPE,
            DTYPE,
            count,
            MemoryFormat.OPAQUE_PAGES,
            busy_loop=False,
            protect=[KEYS[number] for number in protect],
        )
        if missing > len(may_go):
            assert objs is None
            return None
        for number in may_go[: max(0, missing)]:
            self._forget(number)
            self.evicted += 1
        assert objs is not None
        return objs

    @rule(batch=batches)
    def put(self, batch):
        objs = self._allocate(len(batch))
        if objs is not None:
            self._put(batch, objs)

    @rule(run=prefixes)
    def store(self, run):
        """As an engine does: what is missing of a prompt, without evicting the rest of it."""
        missing = [number for number in run if number not in self.order.entries]
        objs = self._allocate(len(missing), protect=run)
        if objs is not None:
            self._put(missing, objs)

    def _put(self, batch, objs):
        keys = [KEYS[number] for number in batch]
        for key, obj in zip(keys, objs, strict=True):
            obj.array[:] = np.frombuffer(bytes_of(key), np.uint8)
        new = [number for number in dict.fromkeys(batch) if number not in self.order.entries]
        with References(objs) as mine:
            outcomes = self.pool.batched_submit_put_task(keys, mine.objects)
        for index, number in enumerate(batch):
            is_new = number in new and number not in batch[:index]
            assert outcomes[index] is (PutOutcome.STORED if is_new else PutOutcome.PRESENT)
        for number in reversed(new):
            self.order.put(number)

    @rule(batch=batches, keep=st.booleans())
    def get(self, batch, keep):
        keys = [KEYS[number] for number in batch]
        objs = self.pool.batched_get_blocking(keys)
        assert [obj is not None for obj in objs] == [n in self.order.entries for n in batch]
        self.order.use(batch)
        if keep:
            found = [number for number in batch if number in self.order.entries]
            self._hold(found, 1)
            names = [(number, self.generation[number]) for number in found]
            self.readers.append((names, References(objs)))
        else:
            check_found(keys, objs)

    @rule(run=prefixes, count=st.integers(1, 7))
    def allocate_buffers(self, run, count):
        objs = self._allocate(count, protect=run)
        if objs is not None:
            for obj in objs:
                obj.array[:] = 255
            self.buffers.append(References(objs))

    @rule()
    def release_buffers(self):
        while self.buffers:
            self.buffers.pop().release()

    @rule(run=prefixes)
    def look_up(self, run):
        lease = Lease("lease", time.monotonic() + 600)
        found = self.pool.batched_contains([KEYS[number] for number in run], pin=lease)
        expected = next((i for i, n in enumerate(run) if n not in self.order.entries), len(run))
        assert found == expected
        self._hold(run[:found], 1)
        names = [(number, self.generation[number]) for number in run[:found]]
        self.leases.append((names, lease))

    @rule(data=st.data())
    def release_a_reader(self, data):
        if self.readers:
            names, held = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
            held.release()
            self._unhold(names)

    @rule(data=st.data())
    def release_a_lease(self, data):
        if self.leases:
            names, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            lease.release()
            lease.release()
            self._unhold(names)
            self.order.use([n for n, generation in names if self.generation[n] == generation])

    def _unhold(self, names):
        for name in names:
            self.held[name] -= 1
            if not self.held[name]:
                del self.held[name]

    @rule(batch=batches)
    def touch(self, batch):
        self.pool.touch_cache([KEYS[number] for number in batch])
        self.order.use(batch)

    @rule(run=prefixes)
    def note_order(self, run):
        self.pool.note_order([KEYS[number] for number in run])
        self.order.note(run)
        in_order = [number for number in self.order.ranked() if number in run]
        assert in_order == [n for n in reversed(run) if n in self.order.entries]

    @rule(batch=batches)
    def remove(self, batch):
        present = {number for number in batch if number in self.order.entries}
        assert self.pool.batched_remove([KEYS[number] for number in batch]) == len(present)
        for number in present:
            self._forget(number)

    @rule(chance=st.integers(0, 9))
    def clear(self, chance):
        if chance:
            return
        assert self.pool.clear() == len(self.order.entries)
        for number in list(self.order.entries):
            self._forget(number)

    @invariant()
    def index_pool_and_counters_agree(self):
        if not hasattr(self, "pool"):
            return
        in_order = self.pool._policy.get_evict_candidates(
            self.pool.hot_cache, len(KEYS), lambda obj: True
        )
        assert in_order == [KEYS[number] for number in self.order.ranked()]
        assert set(self.pool.keys()) == set(in_order)
        report = self.pool.memcheck()
        assert report.num_objects == self._used_slots()
        assert report.used_bytes + report.free_bytes == report.capacity_bytes
        assert self.metrics.snapshot().get(EVICTIONS, 0) == self.evicted

    @invariant()
    def held_bytes_are_right(self):
        if not hasattr(self, "pool"):
            return
        for names, held in self.readers:
            for (number, _), obj in zip(names, held.objects, strict=True):
                check_found([KEYS[number]], [again(obj)])
        for names, lease in self.leases:
            keys = [KEYS[number] for number, _ in names]
            assert all(check_found(keys, [lease.get(key) for key in keys]))
        for key, obj in self.pool.hot_cache.items():
            check_found([key], [again(obj)])

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for _, held in self.readers:
            held.release()
        for _, lease in self.leases:
            lease.release()
        self.release_buffers()
        assert not any(obj.is_pinned or obj.ref_count != 1 for obj in self.pool.hot_cache.values())
        self.pool.clear()
        assert self.pool.memcheck().used_bytes == 0
        self.pool.close()


def again(obj):
    obj.ref_count_up()
    return obj


@pytest.mark.parametrize("policy", ["fifo", "lfu", "lru", "mru"])
def test_pool_index_and_policy(policy):
    machine = type(f"PoolMachine_{policy}", (PoolMachine,), {"policy": policy})
    case = machine.TestCase
    case.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
    case().runTest()
