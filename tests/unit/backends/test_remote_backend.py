"""RemoteBackend over a shared directory: what it asks of a store, and when."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kvkeep.backends.base import Lease, PutOutcome
from kvkeep.backends.remote.base import HEADER_BYTES, Refusal, Value
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.metrics import Metrics
from kvkeep.testing.chunks import (
    CHUNK_BYTES,
    DTYPE,
    SHAPE,
    bytes_of,
    check_found,
    fill,
    make_keys,
    make_pool,
    put,
    wait_until,
)
from kvkeep.testing.remote_stores import read
from support.disk import IDENTITY
from support.remote import StubbornConnector, make_connector, make_remote, name_of

WAIT_S = 20.0
KEYS = make_keys(6)
STORED, PRESENT, DROPPED = PutOutcome.STORED, PutOutcome.PRESENT, PutOutcome.DROPPED


@pytest.fixture
def pool():
    pool = make_pool()
    yield pool
    pool.clear()
    wait_until(lambda: pool.memcheck().num_objects == 0)
    pool.close()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def connector(tmp_path):
    return StubbornConnector(make_connector(f"file://{tmp_path}"))


@pytest.fixture
def remote(pool, connector, metrics):
    remote = make_remote(pool, connector, metrics=metrics)
    assert remote.flush(WAIT_S)  # the first probe
    connector.calls.clear()
    yield remote
    connector.before = lambda operation: None
    remote.close()


@pytest.fixture
def other(tmp_path):
    """Another machine's tier over the same store."""
    pool = make_pool()
    remote = make_remote(pool, f"file://{tmp_path}")
    yield lambda keys: put(remote, pool, keys)
    remote.close()
    pool.clear()
    pool.close()


@pytest.fixture
def gate():
    """What hanging calls wait for."""
    event = threading.Event()
    yield event
    event.set()


def hang(gate, *operations):
    def before(operation):
        if operation in operations:
            gate.wait(WAIT_S)

    return before


def value_of(metrics, name, **labels):
    wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return metrics.snapshot().get(f"kvkeep_{name}{{{wanted}}}", 0)


def failures(metrics, operation, cause):
    return value_of(
        metrics, "failures_total", tier="RemoteBackend", operation=operation, cause=cause
    )


def dropped(metrics, cause):
    return value_of(metrics, "dropped_chunks_total", tier="RemoteBackend", cause=cause)


def submit(remote, pool, keys):
    with References(fill(pool, keys)) as held:
        return remote.batched_submit_put_task(keys, held.objects)


def lease():
    return Lease("request", time.monotonic() + 60)


# -- lookups -------------------------------------------------------------------------------------


def test_a_lookup_of_nothing_is_one_question(remote, connector):
    """A cold prompt costs one request, however long it is."""
    assert remote.batched_contains(make_keys(50), pin=lease()) == 0
    assert connector.calls == {"sizes": 1}


def test_a_lookup_fetches_what_the_pool_does_not_have(remote, connector, pool, other, metrics):
    """One question, and loads of the missing chunks alone."""
    other(KEYS)
    with References(fill(pool, [KEYS[1], KEYS[4]])) as held:
        pool.batched_submit_put_task([KEYS[1], KEYS[4]], held.objects)
    asked = []
    connector.change = lambda operation, answer: asked.append((operation, len(answer))) or answer
    mine = lease()
    assert remote.batched_contains(KEYS, pin=mine) == 6
    assert asked[0] == ("sizes", 4)
    assert connector.calls["sizes"] == 1
    assert value_of(metrics, "transfer_bytes_count", tier="RemoteBackend", direction="load") == 4
    assert check_found(KEYS, [mine.get(key) for key in KEYS]) == [True] * 6
    assert pool.batched_contains(KEYS) == 6  # they were offered to the pool
    mine.release()


def test_a_gap_in_the_store_ends_the_run(remote, other):
    other([*KEYS[:2], *KEYS[3:]])
    mine = lease()
    assert remote.batched_contains(KEYS, pin=mine) == 2
    assert len(mine) == 2
    mine.release()
    assert remote.batched_contains(KEYS) == 2
    assert remote.batched_async_contains(KEYS).result(WAIT_S) == 2


def test_a_lookup_answers_with_what_has_come_by_its_deadline(pool, connector, other, gate):
    """Chunks that are late are not in the answer, and their memory goes when they end."""
    other(KEYS)
    remote = make_remote(pool, connector, lookup_timeout_s=0.5)
    connector.before = hang(gate, "get")
    mine = lease()
    assert remote.batched_contains(KEYS, pin=mine) == 0
    assert len(mine) == 0
    assert pool.memcheck().num_objects > 0  # a call may still write there
    gate.set()
    wait_until(lambda: pool.memcheck().num_objects == 0)
    assert remote.batched_contains(KEYS, pin=mine) == 0  # the lease was opened too long ago
    later = lease()
    assert remote.batched_contains(KEYS, pin=later) == 6
    later.release()
    pool.clear()
    remote.close()


def test_a_lookup_that_the_store_does_not_answer(pool, connector, gate, metrics):
    remote = make_remote(pool, connector, lookup_timeout_s=0.2, metrics=metrics)
    connector.before = hang(gate, "sizes")
    assert remote.batched_contains(KEYS) == 0
    assert remote.batched_contains(KEYS, pin=lease()) == 0
    assert failures(metrics, "lookup", "timeout") >= 1
    gate.set()
    remote.close()


def test_a_pool_without_room_shortens_the_answer(tmp_path, other, metrics):
    """The lookup never waits for memory."""
    other(KEYS)
    pool = make_pool(4)
    remote = make_remote(pool, f"file://{tmp_path}", metrics=metrics)
    mine = lease()
    assert remote.batched_contains(KEYS, pin=mine) == 4
    assert failures(metrics, "get", "no_memory") == 2
    assert remote.batched_get_blocking(KEYS) == [None] * 6
    mine.release()
    pool.clear()
    assert check_found(KEYS, remote.batched_get_blocking(KEYS)).count(True) == 4
    remote.close()
    pool.clear()
    pool.close()


# -- loads ---------------------------------------------------------------------------------------


def test_loads_as_futures_hold_up_nobody(remote, connector, pool, other, gate):
    """Neither the caller nor an I/O thread waits; the future is answered all the same."""
    other(KEYS)
    connector.before = hang(gate, "sizes", "get")
    futures = [remote.batched_get_non_blocking(KEYS) for _ in range(5)]
    asked = [remote.batched_async_contains(KEYS) for _ in range(5)]
    assert not any(future.done() for future in [*futures, *asked])
    gate.set()
    assert [future.result(WAIT_S) for future in asked] == [6] * 5
    for future in futures:
        assert check_found(KEYS, future.result(WAIT_S)) == [True] * 6


def test_a_load_that_is_too_late_is_a_miss(pool, connector, other, gate, metrics):
    other(KEYS)
    remote = make_remote(pool, connector, load_timeout_s=0.3, metrics=metrics)
    connector.before = hang(gate, "get")
    assert remote.batched_get_blocking(KEYS) == [None] * 6
    assert failures(metrics, "get", "timeout") >= 1
    gate.set()
    wait_until(lambda: pool.memcheck().num_objects == 0)
    remote.close()


def test_what_was_found_is_not_asked_for_again(remote, connector, other, metrics):
    """The load after a lookup is one request, also of a chunk at a time; what went is a miss."""
    other(KEYS)
    assert remote.batched_async_contains(KEYS).result(WAIT_S) == 6
    assert connector.calls["sizes"] == 1
    with References(remote.batched_get_blocking(KEYS)) as held:
        assert None not in held.objects
    for key in KEYS:
        with References(remote.batched_get_non_blocking([key]).result(WAIT_S)) as held:
            assert None not in held.objects
    assert connector.calls["sizes"] == 1
    connector.inner.remove([name_of(KEYS[2])], WAIT_S)
    for _ in range(2):
        assert remote.batched_get_non_blocking(KEYS[2:3]).result(WAIT_S) == [None]
    assert remote.flush(WAIT_S)
    assert failures(metrics, "get", "missing") == 1  # the second one asked first
    assert connector.calls["sizes"] == 2


def test_chunks_that_go_between_question_and_load(remote, connector, other, metrics):
    """Fault 3: a miss at its position; the others are right."""
    other(KEYS)

    def before(operation):
        if operation == "get":
            connector.inner.remove([name_of(KEYS[2])], WAIT_S)

    connector.before = before
    found = check_found(KEYS, remote.batched_get_blocking(KEYS))
    assert found == [True, True, False, True, True, True]
    assert remote.flush(WAIT_S)  # a load is counted after whoever waits for it has it
    assert failures(metrics, "get", "missing") == 1


def test_unfull_chunks_and_others(remote, pool, other):
    """A shorter chunk comes back as it was; one of another kind is not taken."""
    short, strange, large = KEYS[:3]
    objs = [
        pool.allocate((3, 2, 16), DTYPE, MemoryFormat.OPAQUE_PAGES),
        pool.allocate((96,), DTYPE, MemoryFormat.BINARY),
        pool.allocate((4, 3, 16), DTYPE, MemoryFormat.OPAQUE_PAGES),
    ]
    objs[0].array[:] = np.frombuffer(bytes_of(short)[:96], np.uint8)
    with References(objs):
        outcomes = remote.batched_submit_put_task([short, strange, large], objs)
        assert outcomes == [STORED, PutOutcome.NO_ROOM, PutOutcome.NO_ROOM]
    assert remote.flush(WAIT_S)
    with References(remote.batched_get_blocking([short, strange, large])) as held:
        (obj,) = held.objects
        assert obj.metadata.shape == (3, 2, 16)
        assert obj.array.tobytes() == bytes_of(short)[:96]


def test_a_codec_makes_values_smaller_and_all_tiers_read_them(pool, connector, remote):
    """The codec is the writer's choice; readers go by the header."""
    writer = make_remote(pool, connector, codec="zstd")
    put(writer, pool, KEYS)
    sizes = connector.inner.sizes([name_of(key) for key in KEYS], WAIT_S)
    assert all(HEADER_BYTES < size < HEADER_BYTES + CHUNK_BYTES for size in sizes)
    assert check_found(KEYS, remote.batched_get_blocking(KEYS)) == [True] * 6
    writer.close()


# -- stores --------------------------------------------------------------------------------------


def test_where_a_question_is_a_request_stores_ask_for_the_first_chunk(
    remote, connector, pool, other
):
    """Whoever stored a later chunk of a prompt has stored the first ones, too."""
    asked, sent = [], []

    def note(operation, answer):
        counts = {"sizes": asked, "put": sent}
        if operation in counts:
            counts[operation].append(len(answer))
        return answer

    connector.sizes_at_once, connector.change = False, note
    assert put(remote, pool, KEYS[:4]) == [STORED] * 4
    assert (asked, sent) == ([1], [4])
    new = make_keys(4, first=50)
    other(new[:2])
    assert put(remote, pool, new) == [STORED] * 4
    assert (asked[1:], sent[1:]) == ([1, 3], [2])
    assert check_found(new, remote.batched_get_blocking(new)) == [True] * 4


def test_no_call_has_more_values_than_the_connector_takes(connector, pool):
    """So that all threads have something to do up to the end."""
    connector.max_values_per_call = 1
    remote, keys = make_remote(pool, connector), make_keys(9)
    sent = []
    connector.change = lambda operation, answer: (
        sent.append(len(answer)) if operation == "put" else None,
        answer,
    )[1]
    for start in range(0, 9, 3):  # as many as the queue holds
        put(remote, pool, keys[start : start + 3])
    connector.calls.clear()
    assert check_found(keys, remote.batched_get_blocking(keys)) == [True] * 9
    assert sent == [1] * 9
    assert connector.calls["get"] == 9
    remote.close()


def test_what_somebody_else_has_stored_is_not_sent(remote, connector, pool, other):
    """A small question saves a large value."""
    other(KEYS)
    assert submit(remote, pool, KEYS) == [STORED] * 6
    assert remote.flush(WAIT_S)
    assert connector.calls["put"] == 0
    assert submit(remote, pool, KEYS) == [PRESENT] * 6


def test_what_the_store_has_evicted_is_stored_again(remote, connector, pool):
    """The next lookup corrects what this process believes."""
    put(remote, pool, KEYS)
    connector.inner.remove([name_of(key) for key in KEYS[3:]], WAIT_S)
    assert submit(remote, pool, KEYS) == [PRESENT] * 6
    assert remote.batched_contains(KEYS) == 3
    assert submit(remote, pool, KEYS) == [PRESENT] * 3 + [STORED] * 3
    assert remote.flush(WAIT_S)
    assert remote.batched_contains(KEYS) == 6


def test_what_the_store_has_lost_is_stored_again_without_a_lookup(connector, pool):
    """Memory may answer all lookups, or the cost rule may leave the tier out."""
    remote = make_remote(pool, connector, believed_s=0.0)
    put(remote, pool, KEYS)
    connector.inner.remove([name_of(key) for key in KEYS], WAIT_S)
    put(remote, pool, KEYS)
    assert connector.inner.sizes([name_of(key) for key in KEYS], WAIT_S) != [0] * 6
    connector.calls.clear()
    put(remote, pool, KEYS)
    assert connector.calls["put"] == 0  # it was asked, and has them
    remote.close()


def test_a_store_that_is_slow_holds_bounded_memory_and_no_loads(remote, connector, pool, gate,
                                                                metrics, other):  # fmt: skip
    """Fault 43: the rest of a batch is dropped and counted; loads go on meanwhile."""
    other(KEYS)
    connector.before = hang(gate, "put")
    keys = make_keys(40, first=100)
    outcomes = submit(remote, pool, keys)
    kept = outcomes.count(STORED)
    assert 0 < kept < 40
    assert outcomes == [STORED] * kept + [DROPPED] * (40 - kept)
    assert failures(metrics, "put", "queue_full") == 40 - kept
    # two threads store four chunks each, and a quarter of the pool waits
    assert pool.memcheck().num_objects == kept <= 16 + 8
    assert check_found(KEYS, remote.batched_get_blocking(KEYS)) == [True] * 6
    gate.set()
    assert remote.flush(WAIT_S)
    assert submit(remote, pool, keys)[: kept + 4] == [PRESENT] * kept + [STORED] * 4
    assert remote.flush(WAIT_S)


def test_a_chunk_that_is_removed_while_it_is_stored(remote, connector, pool, gate, metrics):
    """It does not come back, and can be stored anew (fault 23)."""
    connector.before = hang(gate, "put")
    assert submit(remote, pool, KEYS) == [STORED] * 6
    with ThreadPoolExecutor(1) as thread:
        wait_until(lambda: connector.calls["put"] == 2)
        removing = thread.submit(remote.batched_remove, KEYS)
        wait_until(lambda: connector.calls["remove"] == 1)
        gate.set()
        assert removing.result(WAIT_S) <= 6
    assert remote.flush(WAIT_S)
    assert remote.batched_contains(KEYS) == 0
    assert dropped(metrics, "removed") == 6
    assert submit(remote, pool, KEYS) == [STORED] * 6
    assert remote.flush(WAIT_S)
    assert remote.batched_contains(KEYS) == 6


# -- identity ------------------------------------------------------------------------------------


def test_other_identities_see_nothing_and_are_not_cleared(remote, connector, pool):
    """Faults 8, 9: not even with the same keys."""
    stranger = make_remote(pool, connector, identity=replace(IDENTITY, model="other"))
    put(remote, pool, KEYS)
    assert stranger.batched_contains(KEYS) == 0
    put(stranger, pool, KEYS[:2])
    assert stranger.clear() == 2
    assert stranger.keys() == []
    assert sorted(remote.keys()) == sorted(KEYS)
    assert remote.clear() == 6
    stranger.close()


def test_a_value_of_another_identity_under_a_chunks_name(remote, connector, pool, metrics):
    """It is refused by its header, removed, and counted."""
    stranger = make_remote(pool, connector, identity=replace(IDENTITY, model="other"))
    put(stranger, pool, KEYS[:1])
    name, theirs = name_of(KEYS[0]), name_of(KEYS[0], replace(IDENTITY, model="other"))
    copy(connector.inner, theirs, name)
    assert remote.batched_get_blocking(KEYS[:1]) == [None]
    assert remote.flush(WAIT_S)
    assert failures(metrics, "get", "wrong_identity") == 1
    wait_until(lambda: connector.inner.sizes([name], WAIT_S) == [0])
    stranger.close()


def copy(connector, source, target):
    (data,) = read(connector, [source])
    connector.put([target], [Value(data[:HEADER_BYTES], data[HEADER_BYTES:])], WAIT_S)


# -- failures ------------------------------------------------------------------------------------


def fail(*operations):
    def before(operation):
        if operation in operations:
            raise ConnectionRefusedError("nobody listens")

    return before


def breaker(metrics, direction):
    return value_of(metrics, "breaker_open", tier="RemoteBackend", direction=direction)


def test_the_breaker_opens_and_closes(remote, connector, pool, metrics, other):
    """Nobody waits for a store that fails; a probe finds it working again."""
    other(KEYS)
    connector.before = fail("sizes", "ping")
    for _ in range(3):
        assert remote.batched_contains(KEYS) == 0
    assert breaker(metrics, "load") == 1
    health = remote.health()
    assert not health.healthy
    assert health.detail.startswith("file:///")
    assert "failing" in health.detail
    assert "nobody listens" in health.detail
    connector.calls.clear()
    assert remote.batched_contains(KEYS, pin=lease()) == 0
    assert remote.batched_get_blocking(KEYS) == [None] * 6
    assert remote.batched_get_non_blocking(KEYS).result(0) == [None] * 6
    assert remote.batched_async_contains(KEYS).result(0) == 0
    assert submit(remote, pool, KEYS) == [DROPPED] * 6
    assert remote.batched_remove(KEYS) == 0
    assert remote.keys() == []
    assert set(connector.calls) <= {"ping"}
    connector.before = lambda operation: None
    wait_until(lambda: remote.health().healthy)
    assert breaker(metrics, "load") == 0
    assert remote.batched_contains(KEYS) == 6


def test_stores_that_fail_do_not_switch_loads_off(remote, connector, pool, metrics, other):
    """They have a breaker of their own, which one attempt after a pause closes."""
    other(KEYS)
    connector.before = fail("put")
    for first in (100, 110, 120):
        submit(remote, pool, make_keys(2, first))
        assert remote.flush(WAIT_S)
    assert breaker(metrics, "store") == 1
    assert remote.health().healthy
    assert check_found(KEYS, remote.batched_get_blocking(KEYS)) == [True] * 6
    assert dropped(metrics, "ConnectionRefusedError") == 6
    connector.before = lambda operation: None
    new = make_keys(1, first=200)
    wait_until(lambda: submit(remote, pool, new) != [DROPPED])
    assert remote.flush(WAIT_S)
    assert breaker(metrics, "store") == 0


def test_a_store_that_is_full_is_left_alone_for_a_while(remote, connector, pool, metrics, other):
    """Refusals are drops, no failures: the breakers stay closed, and loads go on."""
    other(KEYS)
    connector.change = lambda operation, answer: (
        [Refusal.FULL] * len(answer) if operation == "put" else answer
    )
    for first in (100, 110, 120):
        submit(remote, pool, make_keys(2, first))
        assert remote.flush(WAIT_S)
    assert dropped(metrics, "store_full") == 6
    assert submit(remote, pool, make_keys(2, 130)) == [DROPPED] * 2
    assert failures(metrics, "put", "store_refuses") == 1
    assert (breaker(metrics, "store"), breaker(metrics, "load")) == (0, 0)
    assert check_found(KEYS, remote.batched_get_blocking(KEYS)) == [True] * 6
    connector.change = lambda operation, answer: answer
    wait_until(lambda: submit(remote, pool, make_keys(1, 200)) != [DROPPED])
    assert remote.flush(WAIT_S)


def test_clearing_a_store_that_fails_is_an_error(remote, connector, pool):
    """So that the tier owes it, and takes no part before it was cleared."""
    put(remote, pool, KEYS)
    connector.before = fail("remove")
    with pytest.raises(Exception, match="clear"):
        remote.clear()
    connector.before = lambda operation: None
    assert remote.clear() == 6


def test_values_that_are_damaged_are_removed_and_stored_again(remote, connector, pool, metrics):
    """Fault 5: what does not verify is a miss, counted by cause, and gone."""
    put(remote, pool, KEYS)
    names = [name_of(key) for key in KEYS]
    data = read(connector.inner, names)
    flipped = bytearray(data[0])
    flipped[300] ^= 4
    bad = [bytes(flipped), data[1][:-1], data[2][:100], b"", data[4] + b"x", data[0]]
    values = [Value(one[:HEADER_BYTES], one[HEADER_BYTES:]) for one in bad]
    connector.inner.put(names, values, WAIT_S)
    assert remote.batched_contains(KEYS) == 2  # the others have impossible sizes
    assert remote.batched_get_blocking(KEYS) == [None] * 6
    assert remote.flush(WAIT_S)
    assert failures(metrics, "get", "payload_checksum") == 1
    assert failures(metrics, "get", "truncated") == 1
    assert failures(metrics, "lookup", "truncated") == 1
    assert failures(metrics, "lookup", "length") == 1
    assert failures(metrics, "get", "wrong_key") == 1
    assert connector.inner.sizes(names, WAIT_S) == [0] * 6
    assert put(remote, pool, KEYS) == [STORED] * 6
    assert check_found(KEYS, remote.batched_get_blocking(KEYS)) == [True] * 6


def test_closing_with_a_store_that_hangs(pool, connector, gate):
    """It ends by its deadline; queued chunks are dropped, and their memory goes with the calls."""
    remote = make_remote(pool, connector, close_timeout_s=0.2)
    assert remote.flush(WAIT_S)
    connector.before = hang(gate, "put", "sizes")
    submit(remote, pool, make_keys(16))
    future = remote.batched_get_non_blocking(KEYS)
    remote.close()
    assert not remote.health().healthy
    gate.set()
    assert future.result(WAIT_S) == [None] * 6
    assert remote.batched_contains(KEYS) == 0


def test_a_call_that_keeps_no_deadline_takes_the_tier_out(pool, connector, gate, monkeypatch):
    """A connector that hangs for ever keeps its thread; the tier is left out until it ends."""
    monkeypatch.setattr("kvkeep.backends.remote.backend._STALL_MARGIN_S", 0.3)
    remote = make_remote(
        pool, connector, load_timeout_s=0.1, store_timeout_s=0.1, lookup_timeout_s=0.1
    )
    assert remote.flush(WAIT_S)
    assert remote.health().healthy
    connector.before = hang(gate, "sizes")
    assert remote.batched_contains(KEYS) == 0
    wait_until(lambda: not remote.health().healthy)
    assert "stalled" in remote.health().detail
    gate.set()
    wait_until(lambda: remote.health().healthy)
    remote.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_faults_and_never_a_wrong_byte(pool, connector, metrics, seed):
    """Calls that fail, stall and lie at random, from three threads: right bytes or misses."""
    chance = random.Random(seed)
    lock = threading.Lock()

    def draw(limit):
        with lock:
            return chance.random() < limit

    def before(operation):
        if draw(0.15):
            raise ConnectionResetError("at random")
        if draw(0.1):
            time.sleep(0.02)

    def change(operation, answer):
        if draw(0.1):
            raise ConnectionResetError("after the call")
        return answer[:-1] if draw(0.05) else answer

    remote = make_remote(pool, connector, metrics=metrics, load_timeout_s=0.3, lookup_timeout_s=0.2)
    connector.before, connector.change = before, change
    keys = make_keys(20)
    found = 0

    def work(number):
        nonlocal found
        mine = random.Random(100 * seed + number)
        for _ in range(40):
            start = mine.randrange(15)
            some = keys[start : start + mine.randrange(1, 6)]
            action = mine.randrange(5)
            if action < 2:
                objs = pool.batched_allocate(
                    SHAPE, DTYPE, len(some), MemoryFormat.OPAQUE_PAGES, busy_loop=True
                )
                for key, obj in zip(some, objs or [], strict=False):
                    obj.array[:] = np.frombuffer(bytes_of(key), np.uint8)
                with References(objs or []):
                    if objs:
                        remote.batched_submit_put_task(some, objs)
            elif action == 2:
                found += sum(check_found(some, remote.batched_get_blocking(some)))
            elif action == 3:
                mine_lease = lease()
                length = remote.batched_contains(some, pin=mine_lease)
                got = check_found(some, [mine_lease.get(key) for key in some])
                assert got == [index < length for index in range(len(some))]
                mine_lease.release()
            else:
                remote.batched_remove(some[:1])

    with ThreadPoolExecutor(3) as threads:
        for task in [threads.submit(work, number) for number in range(3)]:
            task.result(120)
    connector.before = lambda operation: None
    connector.change = lambda operation, answer: answer
    wait_until(lambda: remote.health().healthy)
    assert remote.flush(WAIT_S)
    assert remote.clear() >= 0
    put(remote, pool, keys[:6])
    # a busy machine may take longer for a load than this tier waits
    wait_until(lambda: all(check_found(keys[:6], remote.batched_get_blocking(keys[:6]))))
    remote.close()
