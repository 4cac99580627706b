"""RedisWire over real sockets: answers in any pieces, nonsense, ends, and deadlines."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.backends.remote.redis_wire import (
    ErrorReply,
    ProtocolError,
    RedisWire,
    command,
    set_command,
)


@pytest.fixture
def ends():
    mine, theirs = socket.socketpair()
    yield mine, theirs
    mine.close()
    theirs.close()


def wire_over(sock, seconds=20.0):
    return RedisWire(sock, time.monotonic() + seconds)


def answering(ends, data, count=1):
    """A wire that has sent ``count`` commands and is answered with these bytes."""
    wire = wire_over(ends[0])
    wire.send([command("PING")] * count, count)
    ends[1].recv(1 << 16)
    ends[1].sendall(data)
    return wire


def test_commands_as_bytes():
    assert command("GET", "a/b") == b"*2\r\n$3\r\nGET\r\n$3\r\na/b\r\n"
    assert command("X", b"\x00\xff", 12) == b"*3\r\n$1\r\nX\r\n$2\r\n\x00\xff\r\n$2\r\n12\r\n"
    assert set_command("é", 7, None) == (b"*3\r\n$3\r\nSET\r\n$2\r\n\xc3\xa9\r\n$7\r\n", b"\r\n")
    before, after = set_command("n", 7, 1500)
    assert before == b"*5\r\n$3\r\nSET\r\n$1\r\nn\r\n$7\r\n"
    assert after == b"\r\n$2\r\nPX\r\n$4\r\n1500\r\n"


def test_answers_of_each_kind(ends):
    wire = answering(ends, b"+OK\r\n:-12\r\n-OOM too much\r\n$-1\r\n-WRONGTYPE x\r\n", count=5)
    assert wire.read_reply() == "OK"
    assert wire.read_reply() == -12
    error = wire.read_reply()
    assert (error, error.code) == (ErrorReply("OOM too much"), "OOM")
    assert wire.read_size() is None
    assert not wire.is_in_step
    assert wire.read_size() == ErrorReply("WRONGTYPE x")
    assert wire.is_in_step


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000, 1 << 20])
def test_values_arrive_in_any_pieces(ends, piece):
    values = [random.Random(size).randbytes(size) for size in (0, 1, 255, 256, 300_000, 17)]
    data = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)

    def send():
        step = piece if len(data) // piece < 20_000 else 4096
        for start in range(0, len(data), step):
            ends[1].sendall(data[start : start + step])

    sender = threading.Thread(target=send)
    sender.start()
    wire = wire_over(ends[0])
    wire.send([command("GET", "x")] * len(values), len(values))
    for value in values:
        size = wire.read_size()
        assert size == len(value)
        target = memoryview(bytearray(size))
        told = []
        wire.read_value(target[: size // 2])
        wire.read_value(target[size // 2 :], told.append)
        wire.end_value()
        assert bytes(target) == value
        assert told == sorted(told)
    assert wire.is_in_step
    sender.join(20)


def test_sending_is_whole_however_slow_the_other_side_is(ends):
    parts = [
        random.Random(number).randbytes(size) for number, size in enumerate((5, 3 << 20, 0, 9))
    ]
    got = bytearray()

    def receive():
        while len(got) < sum(map(len, parts)):
            got.extend(ends[1].recv(70_000))

    receiver = threading.Thread(target=receive)
    receiver.start()
    wire_over(ends[0]).send(parts, 1)
    receiver.join(20)
    assert bytes(got) == b"".join(parts)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"?what\r\n",
        b":12a\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"*1\r\n",
        b"x" * 100_000,
    ],
)
def test_nonsense_is_an_error_and_the_connection_out_of_step(ends, data):
    """Fault 41."""
    wire = answering(ends, data)
    with pytest.raises(ProtocolError):
        wire.read_size()
    assert not wire.is_in_step


def test_a_value_that_is_longer_than_it_says(ends):
    wire = answering(ends, b"$3\r\nabcdef\r\n")
    wire.read_value(memoryview(bytearray(wire.read_size())))
    with pytest.raises(ProtocolError):
        wire.end_value()
    assert not wire.is_in_step


def test_an_answer_too_many_is_seen(ends):
    """Fault 41: bytes that nobody asked for."""
    wire = answering(ends, b"+OK\r\n+OK\r\n")
    assert wire.read_reply() == "OK"
    assert not wire.is_in_step


def test_the_other_side_closes(ends):
    wire = answering(ends, b"$100\r\nabc")
    ends[1].close()
    assert wire.read_size() == 100
    with pytest.raises(ConnectionResetError):
        wire.read_value(memoryview(bytearray(100)))


def test_reading_and_sending_have_a_deadline(ends):
    """Fault 34."""
    wire = wire_over(ends[0], 0.1)
    with pytest.raises(TimeoutError):
        wire.read_reply()
    with pytest.raises(TimeoutError):
        wire.send([bytes(64 << 20)], 1)
    with pytest.raises(TimeoutError):
        wire_over(ends[0], -1).send([b"x"], 1)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_answer_or_an_error(data):
    """No bytes of a server do more than raise an OSError, and none allocate what they name."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        wire = wire_over(mine)
        try:
            size = wire.read_size()
            if isinstance(size, int):
                wire.read_value(memoryview(bytearray(min(size, 1000))))
                wire.end_value()
            wire.read_reply()
        except OSError:
            pass
