"""The parts of the disk tier by themselves: ledger, I/O pool, breaker, loops over short calls."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.backends.disk.directory import chunk_name, key_of, owner_of, temp_name
from kvkeep.backends.disk.files import FileIO, read_fully, write_fully
from kvkeep.backends.disk.ledger import (
    LEDGER_BYTES,
    MAX_MEMBERS,
    Ledger,
    LedgerState,
    Member,
    blocks,
    decode,
    encode,
    lock_is_held,
)
from kvkeep.backends.io_pool import IOPool, StoreJob
from kvkeep.backends.slow_tier import CircuitBreaker
from kvkeep.errors import BackendTimeoutError
from kvkeep.testing.chunks import make_key
from support.disk import FaultyIO

WAIT_S = 20.0
LARGE = 1 << 50


@given(
    stored=st.integers(0, LARGE),
    members=st.dictionaries(
        st.binary(min_size=16, max_size=16),
        st.tuples(st.integers(0, LARGE), st.integers(0, LARGE)),
        max_size=MAX_MEMBERS,
    ),
)
def test_ledger_round_trip(stored, members):
    state = LedgerState(stored, {name: Member(*pair) for name, pair in members.items()})
    data = encode(state)
    assert len(data) == LEDGER_BYTES
    assert decode(data) == state


def test_ledger_golden_vector():
    """As docs/disk.md says."""
    data = encode(LedgerState(0x1122, {bytes(range(16)): Member(0x33, 0x44)}))
    assert data[:56] == b"KVKLEDGR" + bytes.fromhex("0100 0100 00000000 2211000000000000") + bytes(
        32
    )
    assert data[56:88] == bytes(range(16)) + (0x33).to_bytes(8, "little") + (0x44).to_bytes(
        8, "little"
    )
    assert data[88:-8] == bytes(LEDGER_BYTES - 96)
    assert data[-8:].hex() == "472827a0ca2bd925"


@given(st.binary(max_size=100) | st.binary(min_size=LEDGER_BYTES, max_size=LEDGER_BYTES))
def test_ledger_bytes_from_outside(data):
    assert decode(data) is None


def test_accounted_sizes():
    assert [blocks(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_the_ledgers_lock_excludes_and_has_a_deadline(tmp_path):
    one = Ledger(tmp_path / "ledger", lock_timeout_s=WAIT_S)
    two = Ledger(tmp_path / "ledger", lock_timeout_s=0.05)
    with one.locked() as state:
        assert state is None
        one.write_locked(LedgerState(5))
        with pytest.raises(BackendTimeoutError), two.locked():
            pass
    with two.locked() as state:
        assert state == LedgerState(5)
    one.close()
    two.close()
    with pytest.raises(BackendTimeoutError), two.locked():
        pass


def test_a_ledger_that_was_replaced_is_opened_anew(tmp_path):
    ledger = Ledger(tmp_path / "ledger", lock_timeout_s=WAIT_S)
    with ledger.locked():
        ledger.write_locked(LedgerState(5))
    (tmp_path / "ledger").unlink()
    with ledger.locked() as state:
        assert state is None
        ledger.write_locked(LedgerState(6))
    with ledger.locked() as state:
        assert state == LedgerState(6)
    ledger.close()


def test_a_waiter_gets_the_lock_when_it_is_free(tmp_path):
    one = Ledger(tmp_path / "ledger", lock_timeout_s=WAIT_S)
    two = Ledger(tmp_path / "ledger", lock_timeout_s=WAIT_S)

    def take():
        with two.locked():
            return True

    with ThreadPoolExecutor(1) as other:
        with one.locked():
            waiting = other.submit(take)
            time.sleep(0.02)
            assert not waiting.done()
        assert waiting.result(WAIT_S)
    one.close()
    two.close()


def test_who_is_alive(tmp_path):
    path = tmp_path / "member"
    assert not lock_is_held(path)
    with path.open("wb") as file:
        assert not lock_is_held(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock_is_held(path)
    assert not lock_is_held(path)


def test_names():
    key = make_key("x")
    path = chunk_name(key)
    assert key_of(path.parent.name, path.name) == key
    for fan, name in (
        ("00", path.name),
        (path.parent.name, path.name.upper()),
        (path.parent.name, path.stem),
        (path.parent.name, path.stem[:-2] + ".kvc"),
        (path.parent.name, "zz" * 32 + ".kvc"),
        (path.parent.name, path.stem + " .kvc"),
    ):
        assert key_of(fan, name) is None
    assert owner_of(temp_name(b"o" * 16, 3, 4096)) == (b"o" * 16, 4096)
    assert owner_of((b"o" * 16).hex()) == (b"o" * 16, 0)
    for name in ("", "garbage", "00-1-2.tmp", "00" * 16 + "-1-x.tmp"):
        assert owner_of(name)[0] is None


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    piece=st.integers(1, 50),
    have=st.integers(0, 200),
)
def test_short_calls(tmp_path_factory, sizes, piece, have):
    path = tmp_path_factory.mktemp("short") / "file"
    data = os.urandom(sum(sizes))
    io = FaultyIO(piece=piece)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        cuts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        parts = [data[a:b] for a, b in pairwise(cuts)]
        write_fully(io, fd, [memoryview(part) for part in parts])
        assert path.read_bytes() == data
        have = min(have, len(data))
        os.truncate(path, have)
        targets = [bytearray(size) for size in sizes]
        assert read_fully(io, fd, [memoryview(target) for target in targets]) == have
        assert b"".join(targets)[:have] == data[:have]
    finally:
        os.close(fd)


def test_a_write_that_takes_nothing():
    class Full(FileIO):
        def write(self, fd, buffers, offset):
            return 0

    with pytest.raises(OSError, match="no bytes"):
        write_fully(Full(), 0, [memoryview(b"x")])


@pytest.fixture
def make_pool_of():
    pools = []

    def make(threads=2, max_queued_bytes=100, on_error=lambda: None):
        pools.append(
            IOPool(
                name="test", threads=threads, max_queued_bytes=max_queued_bytes, on_error=on_error
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close(WAIT_S)


def test_loads_before_stores_and_bounded_stores(make_pool_of):
    """Fault 43: with every thread busy, queued loads start before queued stores."""
    pool = make_pool_of()
    gate, order, held = threading.Event(), [], threading.Semaphore(0)

    def hold():
        held.release()
        assert gate.wait(WAIT_S)

    blocked = [pool.load(hold), pool.load(hold)]
    assert held.acquire(timeout=WAIT_S)
    assert held.acquire(timeout=WAIT_S)
    drop = lambda: order.append("dropped")  # noqa: E731
    stores = [pool.store(StoreJob(lambda n=n: order.append(n), drop, 40)) for n in range(4)]
    assert stores == [True, True, False, False]
    loads = [pool.load(lambda n=n: order.append(f"load {n}")) for n in range(20)]
    pool.load(lambda: order.append("first"), first=True)
    assert pool.longest_running_s() > 0
    gate.set()
    for future in [*blocked, *loads]:
        future.result(WAIT_S)
    assert pool.wait_idle(WAIT_S)
    assert order.index("first") == 0
    assert min(order.index(0), order.index(1)) >= 19
    assert pool.longest_running_s() == 0.0


def test_slow_stores_leave_a_thread_for_loads(make_pool_of):
    pool = make_pool_of(threads=3, max_queued_bytes=10_000)
    gate = threading.Event()
    for _ in range(5):
        assert pool.store(StoreJob(lambda: gate.wait(WAIT_S), lambda: None, 1))
    assert pool.load(lambda: 7).result(WAIT_S) == 7
    gate.set()


def test_no_idle_thread_is_left_asleep(make_pool_of):
    """Jobs that wait for each other all run: loads in every thread, stores in all but one."""
    pool, begun = make_pool_of(threads=4), []
    for _ in range(100):
        together = threading.Barrier(4)
        loads = [pool.load(partial(together.wait, WAIT_S)) for _ in range(4)]
        assert sorted(load.result(WAIT_S) for load in loads) == [0, 1, 2, 3]
        together = threading.Barrier(4)
        for _ in range(3):
            run = partial(lambda gate: begun.append(gate.wait(WAIT_S)), together)
            assert pool.store(StoreJob(run, list, 1))
        begun.append(together.wait(WAIT_S))  # so all three have begun
        assert pool.wait_idle(WAIT_S)
    assert sorted(begun) == sorted([0, 1, 2, 3] * 100)


def test_a_store_larger_than_the_queue_is_let_in_alone(make_pool_of):
    pool, done = make_pool_of(max_queued_bytes=1), threading.Event()
    assert pool.store(StoreJob(done.set, lambda: None, 1000))
    assert done.wait(WAIT_S)


def test_an_exception_ends_neither_thread_nor_pool(make_pool_of):
    """Fault 28: it is counted, and the next job runs."""
    errors = []
    pool = make_pool_of(on_error=lambda: errors.append(1))

    def fail():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        pool.load(fail).result(WAIT_S)
    assert pool.store(StoreJob(fail, lambda: None, 1))
    assert pool.wait_idle(WAIT_S)
    assert errors == [1]
    assert pool.load(lambda: 1).result(WAIT_S) == 1


def test_after_closing(make_pool_of):
    pool = make_pool_of()
    pool.close(WAIT_S)
    assert pool.load(lambda: 1).cancelled()
    assert not pool.store(StoreJob(lambda: None, lambda: None, 1))


def test_a_breaker_opens_and_closes():
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(3):
        assert not breaker.is_open
        assert breaker.allows()
        breaker.failed()
    assert breaker.is_open
    assert not breaker.allows()
    now[0] = 0.5
    assert breaker.allows()
    assert not breaker.allows(), "one attempt per pause"
    breaker.failed()
    now[0] = 1.0
    assert not breaker.allows(), "pauses grow"
    now[0] = 1.5
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
    assert not breaker.is_open
    breaker.trip()
    assert breaker.is_open
