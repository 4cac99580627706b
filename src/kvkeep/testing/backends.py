"""BackendContract: what every storage backend must do, as a pytest class.

Subclass it, override the fixture ``make_backend``, and pytest runs all of it:

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def make_backend(self):
            return MyBackend  # or any function from the pool's backend to a new, empty one
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvkeep.backends.base import Lease, PutOutcome, StorageBackendInterface
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.hashing import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.testing.chunks import (
    DTYPE,
    SHAPE,
    WAIT_S,
    bytes_of,
    check_found,
    fill,
    make_key,
    make_keys,
    make_pool,
    put,
    wait_until,
)

MakeBackend = Callable[[LocalCPUBackend], StorageBackendInterface]


class BackendContract:
    """Tests that every storage backend must pass."""

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        """Override it: a function from the pool's backend to a new, empty backend."""
        raise NotImplementedError

    @pytest.fixture
    def pool(self) -> Iterator[LocalCPUBackend]:
        """Memory for :data:`kvkeep.testing.chunks.CAPACITY` chunks."""
        pool = make_pool()
        yield pool
        pool.close()

    @pytest.fixture
    def backend(
        self, pool: LocalCPUBackend, make_backend: MakeBackend
    ) -> Iterator[StorageBackendInterface]:
        """A backend after whose test the pool is whole and empty again."""
        backend = make_backend(pool)
        yield backend
        backend.clear()
        pool.clear()
        wait_until(lambda: pool.allocator.usage().num_objects == 0)
        report = pool.memcheck()
        assert (report.num_objects, report.used_bytes) == (0, 0)
        backend.close()
        backend.close()

    def test_it_starts_empty_and_healthy(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """Nothing is found, and that is no error."""
        keys = make_keys(3)
        assert backend.name
        assert backend.keys() == []
        assert backend.health().healthy
        assert not backend.contains(keys[0])
        assert backend.batched_contains(keys) == 0
        assert backend.batched_get_blocking(keys) == [None] * 3
        assert backend.get_blocking(keys[0]) is None
        assert not backend.remove(keys[0])
        assert backend.clear() == 0

    def test_empty_batches(self, pool: LocalCPUBackend, backend: StorageBackendInterface) -> None:
        """An empty question has an empty answer."""
        assert backend.batched_submit_put_task([], []) == []
        assert backend.batched_get_blocking([]) == []
        assert backend.batched_contains([]) == 0
        assert backend.batched_remove([]) == 0
        backend.batched_unpin([])
        backend.touch_cache([])

    def test_what_was_put_can_be_read(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """Bytes, shape, dtype and format come back."""
        keys = make_keys(4)
        assert put(backend, pool, keys) == [PutOutcome.STORED] * 4
        assert sorted(backend.keys()) == sorted(keys)
        assert all(backend.contains(key) for key in keys)
        with References([backend.get_blocking(keys[2])]) as held:
            meta = held.objects[0].metadata
            assert (meta.shape, meta.dtype) == (SHAPE, DTYPE)
            assert meta.fmt is MemoryFormat.OPAQUE_PAGES
        assert check_found(keys, backend.batched_get_blocking(keys)) == [True] * 4
        assert (
            check_found(keys, backend.batched_get_non_blocking(keys).result(WAIT_S)) == [True] * 4
        )

    def test_answers_stand_position_by_position(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """Fault 1: a batch read of a, b, c where b is missing gives a, None, c."""
        keys = make_keys(5)
        put(backend, pool, [keys[0], keys[2], keys[4]])
        found = check_found(keys, backend.batched_get_blocking(keys))
        assert found == [True, False, True, False, True]
        backwards = keys[::-1]
        found = check_found(backwards, backend.batched_get_blocking(backwards))
        assert found == [True, False, True, False, True]

    def test_a_put_skips_what_is_there_and_keeps_the_pairs(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """Fault 2: when some chunks are there already, the others keep their own bytes."""
        keys = make_keys(4)
        put(backend, pool, [keys[0], keys[2]])
        present, stored = PutOutcome.PRESENT, PutOutcome.STORED
        assert put(backend, pool, keys) == [present, stored, present, stored]
        assert check_found(keys, backend.batched_get_blocking(keys)) == [True] * 4

    def test_a_chunk_that_is_there_is_not_rewritten(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """The first bytes of a key stay."""
        key, other = make_keys(2)
        put(backend, pool, [key])
        with References(fill(pool, [other])) as objs:
            assert backend.batched_submit_put_task([key], objs.objects) == [PutOutcome.PRESENT]
        assert check_found([key], backend.batched_get_blocking([key])) == [True]

    def test_one_key_twice_in_a_batch(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """It is stored once; reading it twice gives two references."""
        key = make_key("twice")
        outcomes = put(backend, pool, [key, key])
        assert outcomes == [PutOutcome.STORED, PutOutcome.PRESENT]
        assert check_found([key, key], backend.batched_get_blocking([key, key])) == [True, True]

    def test_as_many_objects_as_keys(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """A put of two keys and one object is a mistake, and nothing of it is stored."""
        keys = make_keys(2)
        with References(fill(pool, keys[:1])) as objs, pytest.raises(ValueError, match="2"):
            backend.batched_submit_put_task(keys, objs.objects)
        assert backend.keys() == []

    def test_contains_counts_the_run_from_the_start(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """A gap ends it."""
        keys = make_keys(6)
        put(backend, pool, [*keys[:3], keys[4]])
        assert backend.batched_contains(keys) == 3
        assert backend.batched_contains(keys[3:]) == 0
        assert backend.batched_contains(keys[4:]) == 1

    def test_contains_is_answered_as_a_future_too(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """The same answers, and nothing is pinned."""
        keys = make_keys(6)
        assert backend.batched_async_contains(keys).result(WAIT_S) == 0
        put(backend, pool, [*keys[:3], keys[4]])
        assert backend.batched_async_contains(keys).result(WAIT_S) == 3
        assert backend.batched_async_contains(keys[4:]).result(WAIT_S) == 1
        assert backend.batched_async_contains([]).result(WAIT_S) == 0

    def test_objects_that_are_handed_in_stay_the_callers(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """The backend takes a reference of its own if it keeps one."""
        key = make_key("mine")
        objs = fill(pool, [key])
        assert backend.batched_submit_put_task([key], objs) == [PutOutcome.STORED]
        assert objs[0].array.tobytes() == bytes_of(key)
        References(objs).release()
        wait_until(lambda: backend.contains(key))
        assert check_found([key], backend.batched_get_blocking([key])) == [True]

    def test_what_was_read_outlives_its_removal(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """A removed chunk is invisible at once; a reader keeps its bytes until it is done."""
        keys = make_keys(3)
        put(backend, pool, keys)
        objs = backend.batched_get_blocking(keys)
        assert backend.remove(keys[0])
        assert not backend.remove(keys[0])
        assert backend.batched_remove(keys) == 2
        assert backend.batched_contains(keys) == 0
        assert backend.keys() == []
        assert check_found(keys, objs) == [True] * 3

    def test_clear(self, pool: LocalCPUBackend, backend: StorageBackendInterface) -> None:
        """It says how many there were, and they can be put again."""
        keys = make_keys(5)
        put(backend, pool, keys)
        assert backend.clear() == 5
        assert backend.keys() == []
        assert put(backend, pool, keys) == [PutOutcome.STORED] * 5

    def test_a_lease_holds_what_was_found(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """Pinned chunks stay readable through the lease, also when they are removed meanwhile."""
        keys = make_keys(4)
        put(backend, pool, keys[:3])
        lease = Lease("request", time.monotonic() + 60)
        assert backend.batched_contains(keys, pin=lease) == 3
        assert not backend.contains(keys[3], pin=lease)
        assert len(lease) == 3
        backend.clear()
        pool.clear()
        assert check_found(keys, [lease.get(key) for key in keys]) == [True, True, True, False]
        lease.release()
        lease.release()
        assert lease.get(keys[0]) is None

    def test_two_leases_on_one_chunk(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """Each gives back its own pin."""
        key = make_key("shared")
        put(backend, pool, [key])
        first, second = (
            Lease("first", time.monotonic() + 60),
            Lease("second", time.monotonic() + 60),
        )
        assert backend.contains(key, pin=first)
        assert backend.contains(key, pin=second)
        first.release()
        backend.clear()
        assert check_found([key], [second.get(key)]) == [True]
        second.release()

    def test_a_lease_that_was_given_back_gets_no_pin(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """Fault 20: a lookup that is answered after its request was given up pins nothing."""
        keys = make_keys(2)
        put(backend, pool, keys)
        lease = Lease("gone", time.monotonic() + 60)
        lease.release()
        assert backend.batched_contains(keys, pin=lease) == 0
        assert not backend.contains(keys[0], pin=lease)
        assert len(lease) == 0

    def test_callbacks_run_without_a_lock(
        self, pool: LocalCPUBackend, backend: StorageBackendInterface
    ) -> None:
        """``on_complete`` is called once per new chunk, which others can read at that moment."""
        keys = make_keys(3)
        put(backend, pool, keys[:1])
        told: list[tuple[ChunkKey, bool]] = []
        done = threading.Event()

        def on_complete(key: ChunkKey) -> None:
            with ThreadPoolExecutor(1) as other:
                told.append((key, other.submit(backend.contains, key).result(WAIT_S)))
            if len(told) == 2:
                done.set()

        with References(fill(pool, keys)) as objs:
            backend.batched_submit_put_task(keys, objs.objects, on_complete=on_complete)
        assert done.wait(WAIT_S)
        assert sorted(told) == sorted([(keys[1], True), (keys[2], True)])

    def test_after_close_everything_is_a_miss(
        self, pool: LocalCPUBackend, make_backend: MakeBackend
    ) -> None:
        """Late callers get answers, no errors."""
        key = make_key("late")
        backend = make_backend(pool)
        put(backend, pool, [key])
        source = make_pool(1)
        with References(fill(source, [key])) as objs:
            backend.close()
            assert backend.batched_submit_put_task([key], objs.objects) == [PutOutcome.DROPPED]
            assert backend.batched_get_blocking([key]) == [None]
            assert not backend.health().healthy
            backend.close()
        source.close()

    def test_threads(self, pool: LocalCPUBackend, backend: StorageBackendInterface) -> None:
        """Eight threads put, read, pin and remove the same chunks; no byte is ever wrong."""
        keys = make_keys(12)
        finished = [False] * 8

        def work(number: int) -> None:
            chance = random.Random(number)
            for _ in range(60):
                some = chance.sample(keys, 3)
                action = chance.randrange(4)
                if action == 0:
                    with References(fill(pool, some)) as objs:
                        backend.batched_submit_put_task(some, objs.objects)
                elif action == 1:
                    check_found(some, backend.batched_get_blocking(some))
                elif action == 2:
                    lease = Lease(str(number), time.monotonic() + 60)
                    found = backend.batched_contains(some, pin=lease)
                    held = check_found(some, [lease.get(key) for key in some])
                    assert held == [index < found for index in range(3)]
                    lease.release()
                else:
                    backend.remove(some[0])
            finished[number] = True

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert finished == [True] * 8
