"""Parts of the remote tier: names of values, hints, loads of single chunks, calls to the store."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    RemoteReports,
    Value,
    key_of,
    name_prefix,
    value_name,
)
from kvkeep.backends.remote.calls import FAIR_S, StoreCalls
from kvkeep.backends.remote.loads import PresenceCache
from kvkeep.backends.remote.values import ChunkLoad, ChunkValue, LoadRules
from kvkeep.backends.slow_tier import CircuitBreaker
from kvkeep.codec.frame import (
    CODEC_ZSTD,
    ChunkMeta,
    FrameFault,
    FrameHeader,
    checksum,
    writer_digest,
)
from kvkeep.codec.names import codec_of
from kvkeep.errors import BackendError, BackendTimeoutError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import dtype_from_name
from kvkeep.metrics import Metrics
from kvkeep.testing.chunks import CHUNK_BYTES, bytes_of, make_keys, make_pool
from kvkeep.testing.remote_stores import random_value, read
from support.disk import IDENTITY
from support.remote import FULL_CHUNK, StubbornConnector, make_connector, name_of

DIGEST = writer_digest(IDENTITY)
KEY, OTHER = make_keys(2)
VALUE = random_value(300)


# -- names ---------------------------------------------------------------------------------------


def test_names_hold_identity_and_key_and_nothing_else():
    """Fault 16: no separator, no long name, nothing of a model's name."""
    prefix = name_prefix(DIGEST)
    name = value_name(prefix, KEY)
    assert name == f"kvkeep-v1/{DIGEST.hex()[:32]}/{KEY.hex()}"
    assert key_of(prefix, name) == KEY
    assert name_of(KEY) == name
    other = name_prefix(writer_digest(replace(IDENTITY, model="a/b")))
    assert other != prefix
    assert key_of(other, name) is None


@pytest.mark.parametrize("tail", ["", "zz" * 32, "AB" * 32, "ab" * 31, "ab" * 33, "ab/cd"])
def test_other_names_are_no_chunks(tail):
    assert key_of(name_prefix(DIGEST), name_prefix(DIGEST) + tail) is None


# -- hints ---------------------------------------------------------------------------------------


def test_a_claim_is_given_once_until_it_ends():
    known = PresenceCache()
    first, again, other = known.claim([KEY, KEY, OTHER])
    assert again is None
    assert first is not None
    assert other is not None
    assert known.claim([KEY]) == [None]
    assert not known.has_seen([KEY])  # it is only about to be stored
    assert known.fulfil(KEY, first)
    assert known.has_seen([KEY])
    assert known.claim([KEY]) == [None]
    known.give_up(OTHER, other)
    assert known.claim([OTHER]) != [None]


def test_a_claim_is_taken_back_by_a_removal():
    known = PresenceCache()
    (claim,) = known.claim([KEY])
    known.forget([KEY])
    assert not known.is_current(KEY, claim)
    assert not known.fulfil(KEY, claim)
    (newer,) = known.claim([KEY])
    known.give_up(KEY, claim)  # the old one ends; the new one stays
    assert known.is_current(KEY, newer)
    known.forget_all()
    assert not known.is_current(KEY, newer)


def test_the_stores_answers_correct_the_hints():
    known = PresenceCache()
    known.saw([KEY])
    assert known.claim([KEY]) == [None]
    assert known.has_seen([KEY])
    assert not known.has_seen([KEY, OTHER])
    known.missed([KEY])
    assert not known.has_seen([KEY])
    assert known.claim([KEY]) != [None]


def test_hints_are_bounded():
    known = PresenceCache(max_known=10)
    keys = make_keys(25)
    known.saw(keys)
    assert len(known) == 10
    assert [claim is None for claim in known.claim(keys[13:17])] == [False, False, True, True]


def test_a_hint_ends_by_itself():
    """The store may have lost the chunk, and is not asked as long as memory has it."""
    now = 100.0
    known = PresenceCache(believed_s=10.0, clock=lambda: now)
    known.saw([KEY, OTHER])
    now = 109.0
    assert known.has_seen([KEY, OTHER])
    assert known.run_length([KEY, OTHER]) == 2
    known.saw([OTHER])
    now = 110.0
    assert not known.has_seen([KEY, OTHER])
    assert known.run_length([KEY, OTHER]) == 0
    claims = known.claim([KEY, OTHER])
    assert claims[0] is not None
    assert claims[1] is None


# -- one value -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[], [1], [1000, 1000], [64, 4000, 10**9], [10**9, 5]])
def test_the_header_of_a_value_is_right_however_its_payload_is_sent(steps):
    """Its checksum is taken on the way; a call that is made again sends the same header."""
    payload = bytes_of(KEY)
    value = ChunkValue(header_of(payload, payload_checksum=bytes(16)), payload)
    assert value.size_bytes == HEADER_BYTES + len(payload)
    for step in steps:
        value.sending(step)
    assert value.header == header_of(payload).pack()
    value.sending(len(payload))
    assert value.header == header_of(payload).pack()


# -- one load ------------------------------------------------------------------------------------


@pytest.fixture
def pool():
    pool = make_pool(4)
    yield pool
    assert pool.memcheck().num_objects == 0
    pool.close()


def allocate(pool, meta=FULL_CHUNK):
    return pool.allocate(meta.shape, dtype_from_name(meta.dtype), meta.fmt, busy_loop=False)


@pytest.fixture
def rules(pool):
    return LoadRules(
        DIGEST, FULL_CHUNK, lambda meta: allocate(pool, meta), RemoteReports(Metrics())
    )


def header_of(payload, **changed):
    header = FrameHeader(
        key=KEY,
        identity=DIGEST,
        meta=FULL_CHUNK,
        payload_bytes=len(payload),
        payload_checksum=checksum(payload),
    )
    return replace(header, **changed)


def frame(payload, *, meta=FULL_CHUNK, **changed):
    return header_of(payload, meta=meta, **changed).pack(), payload


def feed(load, header, payload):
    """As a connector does."""
    target = load.begin(header, len(header) + len(payload))
    if target is not None:
        target[:] = payload
        load.filled(len(payload) // 2)
        load.finish()


def test_a_load_answers_with_a_chunk_that_verifies(pool, rules):
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    feed(load, *frame(bytes_of(KEY)))
    obj = load.future.result(0)
    assert obj.array.tobytes() == bytes_of(KEY)
    assert (load.cause, load.is_bad, obj.ref_count) == (None, False, 1)
    load.end("failed")  # the call is over: nothing changes
    obj.ref_count_down()


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"key": OTHER}, FrameFault.WRONG_KEY),
        ({"identity": bytes(32)}, FrameFault.WRONG_IDENTITY),
        ({"payload_checksum": bytes(16)}, FrameFault.PAYLOAD_CHECKSUM),
        ({"meta": replace(FULL_CHUNK, shape=(3, 8, 8))}, FrameFault.WRONG_LAYOUT),
        ({"meta": replace(FULL_CHUNK, fmt=MemoryFormat.KV_2LTD)}, FrameFault.WRONG_LAYOUT),
        ({"meta": ChunkMeta(MemoryFormat.BINARY, "uint8", (192,))}, FrameFault.WRONG_LAYOUT),
        ({"codec": CODEC_ZSTD, "payload_bytes": 100}, FrameFault.LENGTH),
    ],
)
def test_another_chunk_is_refused(pool, rules, changed, cause):
    """Faults 1, 5, 8, 9: whole frames that are not the ones that were asked for."""
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    feed(load, *frame(bytes_of(KEY), **changed))
    assert load.future.result(0) is None
    assert (load.cause, load.is_bad) == (cause, True)


@pytest.mark.parametrize(
    ("header", "size_bytes", "cause"),
    [
        (b"", 0, FrameFault.TRUNCATED),
        (b"x" * 100, 100, FrameFault.TRUNCATED),
        (b"x" * 256, 448, FrameFault.MAGIC),
        (b"", 1 << 40, FrameFault.LENGTH),
        (frame(bytes_of(KEY))[0], 447, FrameFault.TRUNCATED),
        (frame(bytes_of(KEY))[0], 256, FrameFault.TRUNCATED),
        (frame(bytes_of(KEY)[:96], meta=replace(FULL_CHUNK, shape=(3, 2, 16)))[0], 400,
         FrameFault.LENGTH),
    ],
)  # fmt: skip
def test_sizes_are_checked_before_anything_is_read(pool, rules, header, size_bytes, cause):
    """Fault 44: emptied, cut, and oversized values."""
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    assert load.begin(header, size_bytes) is None
    assert (load.future.result(0), load.cause, load.is_bad) == (None, cause, True)


def test_every_bit_of_a_value_is_checked(pool, rules):
    header, payload = frame(bytes_of(KEY))
    value = bytearray(header + payload)
    for position in range(len(value)):
        value[position] ^= 1 << (position % 8)
        load = ChunkLoad("name", KEY, allocate(pool), rules)
        feed(load, bytes(value[:HEADER_BYTES]), bytes(value[HEADER_BYTES:]))
        assert load.future.result(0) is None, position
        assert load.is_bad
        value[position] ^= 1 << (position % 8)


def test_a_chunk_that_is_not_full(pool, rules):
    """It gets memory of its own size, and the memory for a full one is given back."""
    payload = bytes_of(KEY)[:96]
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    feed(load, *frame(payload, meta=replace(FULL_CHUNK, shape=(3, 2, 16))))
    obj = load.future.result(0)
    assert (obj.metadata.shape, obj.array.tobytes()) == ((3, 2, 16), payload)
    assert pool.memcheck().num_objects == 1
    obj.ref_count_down()


def test_no_memory_for_a_chunk_that_is_not_full(pool, rules):
    """A miss that is not the value's fault, so the value stays."""
    held = [allocate(pool) for _ in range(4)]
    load = ChunkLoad("name", KEY, held.pop(), rules)
    feed(load, *frame(bytes_of(KEY)[:96], meta=replace(FULL_CHUNK, shape=(3, 2, 16))))
    assert (load.future.result(0), load.cause, load.is_bad) == (None, "no_memory", False)
    for obj in held:
        obj.ref_count_down()


def test_an_encoded_chunk(pool, rules):
    payload = codec_of("zstd").encode(bytes_of(KEY), FULL_CHUNK)
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    feed(load, *frame(payload, codec=CODEC_ZSTD))
    obj = load.future.result(0)
    assert obj.array.tobytes() == bytes_of(KEY)
    obj.ref_count_down()


def test_an_encoded_chunk_that_its_codec_cannot_have_made(pool, rules):
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    feed(load, *frame(b"no zstd at all", codec=CODEC_ZSTD))
    assert (load.future.result(0), load.cause, load.is_bad) == (None, FrameFault.CODEC, True)


def test_a_load_that_is_begun_again(pool, rules):
    """A second try of the same call starts from nothing."""
    header, payload = frame(bytes_of(KEY))
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    target = load.begin(header, len(header) + len(payload))
    target[:100] = payload[50:150]
    load.filled(100)
    feed(load, header, payload)
    obj = load.future.result(0)
    assert obj.array.tobytes() == bytes_of(KEY)
    obj.ref_count_down()


def test_memory_outlives_a_reader_that_has_given_up(pool, rules):
    """Fault 15: a late call writes into memory that is still the load's own."""
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    header, payload = frame(bytes_of(KEY))
    target = load.begin(header, len(header) + len(payload))
    assert load.future.cancel()
    assert pool.memcheck().num_objects == 1
    target[:] = payload
    load.finish()
    assert pool.memcheck().num_objects == 0


@pytest.mark.parametrize(
    ("begun", "cause", "expected"),
    [(False, "missing", "missing"), (True, "missing", "unfinished"), (True, "timeout", "timeout")],
)
def test_a_load_that_was_not_finished(pool, rules, begun, cause, expected):
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    if begun:
        load.begin(frame(bytes_of(KEY))[0], 448)
    load.end(cause)
    assert (load.future.result(0), load.cause, load.is_bad) == (None, expected, False)


def test_memory_that_is_expected_to_be_filled(pool, rules):
    """For clients that read a whole value at once: the same memory, if the header is right."""
    load = ChunkLoad("name", KEY, allocate(pool), rules)
    expected = load.expected(CHUNK_BYTES)
    assert load.expected(CHUNK_BYTES - 1) is None
    header, payload = frame(bytes_of(KEY))
    expected[:] = payload
    assert load.begin(header, len(header) + len(payload)) is expected
    load.finish()
    load.future.result(0).ref_count_down()


# -- calls ---------------------------------------------------------------------------------------


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def connector(tmp_path):
    return StubbornConnector(make_connector(f"file://{tmp_path}"))


@pytest.fixture
def calls(connector, metrics):
    return StoreCalls(connector, RemoteReports(metrics))


def fail(*errors):
    """What a connector does: these errors in turn, then none."""
    left = list(errors)

    def before(operation):
        if left:
            raise left.pop(0)

    return before


def soon():
    return time.monotonic() + 20.0


def broken(error=BackendError):
    return error("broken on purpose", backend="RemoteBackend", operation="test")


def failures(metrics):
    values = metrics.snapshot()
    return {name: value for name, value in values.items() if name.startswith("kvkeep_failures")}


def test_a_call_is_made_a_second_time_and_no_third(calls, connector, metrics):
    """Fault 35: the first one may have met a connection of a server that was restarted."""
    breaker = CircuitBreaker()
    connector.before = fail(broken())
    assert calls.sizes(["a"], soon(), breaker) == [0]
    assert connector.calls["sizes"] == 2
    connector.before = fail(broken(), broken(), broken())
    with pytest.raises(BackendError):
        calls.sizes(["a"], soon(), breaker)
    assert connector.calls["sizes"] == 4
    assert not breaker.is_open
    name = 'kvkeep_failures_total{tier="RemoteBackend",operation="lookup",cause="BackendError"}'
    assert failures(metrics) == {name: 3.0}


def test_a_call_that_took_all_its_time_is_not_made_again(calls, connector, metrics):
    """Fault 34."""
    connector.before = fail(broken(BackendTimeoutError), ZeroDivisionError("never reached"))
    with pytest.raises(BackendTimeoutError):
        calls.ping(soon(), CircuitBreaker())
    assert connector.calls["ping"] == 1


def test_no_call_is_made_without_time(calls, connector):
    """It is no failure of the store either: the breaker stays closed."""
    breaker = CircuitBreaker()
    for _ in range(5):
        with pytest.raises(BackendTimeoutError):
            calls.ping(time.monotonic() - 1, breaker)
    assert connector.calls["ping"] == 0
    assert not breaker.is_open


@pytest.mark.parametrize("seconds", [FAIR_S / 10, 20.0])
def test_only_a_store_that_had_time_is_to_blame_for_a_timeout(calls, connector, seconds):
    """Calls that waited for a thread until their time was nearly over open no breaker."""
    breaker = CircuitBreaker()
    for _ in range(3):
        connector.before = fail(broken(BackendTimeoutError))
        with pytest.raises(BackendTimeoutError):
            calls.ping(time.monotonic() + seconds, breaker)
    assert breaker.is_open == (seconds > FAIR_S)


def test_the_causes_of_failures_are_the_clients(calls, connector, metrics):
    """Whatever a client raises is a failure of the store, under the name of its class."""

    def before(operation):
        try:
            raise ConnectionResetError("gone")
        except ConnectionResetError as error:
            raise broken() from error

    connector.before = before
    with pytest.raises(BackendError):
        calls.put([], [], soon(), CircuitBreaker())
    connector.before = fail(KeyError("a mistake"), KeyError("a mistake"))
    with pytest.raises(BackendError, match="KeyError"):
        calls.remove(["a"], soon())
    head = 'kvkeep_failures_total{tier="RemoteBackend",operation='
    assert failures(metrics) == {
        f'{head}"put",cause="ConnectionResetError"}}': 2.0,
        f'{head}"remove",cause="KeyError"}}': 2.0,
    }


def test_three_failures_open_the_breaker_and_a_success_closes_it(calls, connector):
    breaker = CircuitBreaker()
    for count in range(3):
        assert breaker.is_open == (count == 3)
        connector.before = fail(broken(), broken())
        with pytest.raises(BackendError):
            calls.ping(soon(), breaker)
    assert breaker.is_open
    calls.ping(soon(), breaker)
    assert not breaker.is_open


@pytest.mark.parametrize("operation", ["sizes", "put", "remove"])
@pytest.mark.parametrize("change", [lambda answer: answer[:-1], lambda answer: [*answer, 0]])
def test_an_answer_of_another_length_is_a_failure(calls, connector, operation, change):
    """Faults 1, 2: it is never paired with names."""
    connector.change = lambda done, answer: change(answer) if done == operation else answer
    run = {
        "sizes": lambda: calls.sizes(["a", "b"], soon(), CircuitBreaker()),
        "put": lambda: calls.put(["a"], [VALUE], soon(), CircuitBreaker()),
        "remove": lambda: calls.remove(["a", "b"], soon()),
    }[operation]
    with pytest.raises(BackendError, match="answers for"):
        run()


def test_a_second_get_asks_for_the_rest_only(calls, connector, pool, rules):
    """What has come is not asked for again."""
    names = [name_of(KEY), name_of(OTHER)]
    header, payload = frame(bytes_of(KEY))
    connector.inner.put(names[:1], [Value(header, payload)], 5.0)
    asked = []

    def before(operation):
        asked.append(operation)

    def change(operation, answer):
        if asked.count("get") == 1:
            raise broken()
        return answer

    connector.before, connector.change = before, change
    loads = [
        ChunkLoad(name, key, allocate(pool), rules)
        for name, key in zip(names, (KEY, OTHER), strict=True)
    ]
    assert calls.get(loads, soon(), CircuitBreaker()) == "missing"
    assert [load.is_over for load in loads] == [True, False]
    loads[0].future.result(0).ref_count_down()
    loads[1].end("missing")
    assert read(connector, names)[1] is None
