"""The lookup service's wire: what was written is read again, and nothing else is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import LookupServiceError
from kvkeep.hashing import Extra
from kvkeep.lookup.protocol import (
    Check,
    CheckReply,
    Clear,
    ClearReply,
    Counted,
    ErrorReply,
    Hello,
    HelloReply,
    Keep,
    Lookup,
    LookupReply,
    Numbers,
    NumbersReply,
    Start,
    Started,
    Unpin,
    WireScope,
    decode_reply,
    decode_request,
    encode,
    number_of,
)
from kvkeep.tokens import RequestScope

SCOPE = RequestScope("salt", "adapter@1f", (("team", "a"),), (Extra(3, "image\0ab"),))

REQUESTS = [
    Hello(1, 1),
    Lookup(2, "req#1", b"\1\0\0\0", WireScope.of(SCOPE), True),
    Counted(3, 5, (("tier", 3),), (("timeout", 2),)),
    Start(3, "req#1", b"\1\0\0\0", WireScope.of(SCOPE)),
    Keep(3, "req#1", 512),
    Unpin(3, ("req#1", "req#2")),
    Check(4),
    Numbers(4),
    Clear(5, ("LocalCPUBackend",)),
]
REPLIES = [
    HelloReply(1, 1, 0, 2, 256, b"d" * 32),
    LookupReply(2, 512),
    LookupReply(3, 512, (("tier", 256), ("other", 256))),
    Started(3),
    CheckReply(4, 0, 1, 2, 3, 4, {"kvkeep_x_total": 1.5}),
    NumbersReply(4, {"kvkeep_x_total": 1.5}),
    ClearReply(5, 7),
    ErrorReply(6, "no"),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_requests_survive_the_wire(message):
    assert decode_request(encode(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda m: type(m).__name__)
def test_replies_survive_the_wire(message):
    assert decode_reply(encode(message)) == message


def test_scope_survives_the_wire():
    assert WireScope.of(SCOPE).scope() == SCOPE


def test_golden_bytes():
    """A change of these bytes is a change of the protocol's version."""
    assert encode(REQUESTS[1]).hex() == (
        "96a66c6f6f6b757002a57265712331c404010000009"
        "4a473616c74aa61646170746572403166"
        "9192a47465616da1619192"
        "03a8696d616765006162c3"
    )
    assert encode(LookupReply(2, 512)).hex() == "94ac6c6f6f6b75705f7265706c7902cd020090"


@pytest.mark.parametrize("message", REPLIES, ids=lambda m: type(m).__name__)
def test_replies_are_no_requests(message):
    with pytest.raises(LookupServiceError, match="malformed"):
        decode_request(encode(message))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x93\xa5check",
        msgspec.msgpack.encode(["nothing", 1]),
        msgspec.msgpack.encode(["check", -1]),
        msgspec.msgpack.encode(["check", 1 << 63]),
        msgspec.msgpack.encode(["lookup", 1, "", b"", ["", "", [], []], True, True]),
        msgspec.msgpack.encode(["lookup", 1, "x" * 1025, b"", ["", "", [], []], True, True]),
        msgspec.msgpack.encode(["lookup", 1, "x", "text", ["", "", [], []], True, True]),
        msgspec.msgpack.encode(["lookup", 1, "x", b"", ["s" * 4097, "", [], []], True, True]),
        msgspec.msgpack.encode(["lookup", 1, "x", b"", ["", "", [], [[-1, "h"]]], True, True]),
        msgspec.msgpack.encode(["unpin", 1, ["x"] * 65537]),
        b"\x91" * 100_000,
    ],
    ids=range(14),
)
def test_malformed_is_an_error(data):
    with pytest.raises(LookupServiceError, match="malformed"):
        decode_request(data)


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (msgspec.msgpack.encode(["lookup", 7, "", b""]), 7),
        (msgspec.msgpack.encode(["nonsense", 7]), 7),
        (msgspec.msgpack.encode(["lookup", -7]), 0),
        (msgspec.msgpack.encode(["lookup", True]), 0),
        (msgspec.msgpack.encode(["lookup", 1 << 63]), 0),
        (msgspec.msgpack.encode(["lookup"]), 0),
        (msgspec.msgpack.encode({"lookup": 7}), 0),
        (b"\x91" * 100_000, 0),
        (b"\x92\xa1\xff\x07", 0),
        (b"", 0),
    ],
    ids=range(10),
)
def test_the_number_of_a_question_that_is_malformed(data, number):
    assert number_of(data) == number


@given(st.binary(max_size=300))
def test_fuzz_any_bytes(data):
    """Spec 13.1: bytes from outside either are a message or are refused, in one way."""
    assert number_of(data) >= 0
    for decode in (decode_request, decode_reply):
        try:
            message = decode(data)
        except LookupServiceError:
            continue
        assert decode(encode(message)) == message


@given(st.sampled_from(REQUESTS), st.data())
def test_fuzz_damaged_messages(message, data):
    whole = bytearray(encode(message))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for damaged in (bytes(whole), bytes(whole[:cut])):
        try:
            read = decode_request(damaged)
        except LookupServiceError:
            continue
        assert decode_request(encode(read)) == read
