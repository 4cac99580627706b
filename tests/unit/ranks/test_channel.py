from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from kvkeep.errors import RankError
from kvkeep.ranks.base import (
    MAX_MESSAGE_BYTES,
    PREFIX,
    Channel,
    Done,
    Join,
    Plan,
    Verdict,
    Welcome,
    body_size,
    decode,
    encode,
)

DIGEST = bytes(range(32))
MESSAGES = [
    Join(1, 2, 3, DIGEST),
    Welcome("0" * 32, 1 << 40),
    Plan(7, DIGEST, False, ((0, 5), (64, 5))),
    Plan(8, DIGEST, refused=True),
    Done(7, 2),
    Verdict(7, 1),
]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channels = Channel(ours), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()
        channel.close()


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_come_back(message) -> None:
    data = encode(message)
    assert body_size(data[: PREFIX.size]) == len(data) - PREFIX.size
    assert decode(data[PREFIX.size :]) == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x91\xa4done",
        encode(Done(1, 2))[PREFIX.size : -1],
        encode(Done(1, 2))[PREFIX.size :] + b"\x00",
        b"\x94\xa4done\x01\x02\x03",
        b"\x93\xa4done\x01\xff",
        b"\x93\xa4plan\x01\xc4\x05short",
        b"\x91" * 5000,
    ],
    ids=range(9),
)
def test_what_is_no_message_is_refused(body) -> None:
    with pytest.raises(RankError, match="malformed"):
        decode(body)


def test_a_length_beyond_all_bounds_is_refused_before_the_body() -> None:
    with pytest.raises(RankError, match="at most"):
        body_size(PREFIX.pack(MAX_MESSAGE_BYTES + 1))


def test_messages_cross_in_order_also_in_pieces(pair) -> None:
    ours, theirs = pair
    for message in MESSAGES:
        ours.send(message, soon())
    assert [theirs.receive(soon()) for _ in MESSAGES] == MESSAGES
    assert theirs.receive(0.0) is None
    data = encode(MESSAGES[2])
    for byte in data:
        assert theirs.receive(0.0) is None
        ours._sock.send(bytes([byte]))
    assert theirs.receive(0.0) == MESSAGES[2], "what has come is read also after the deadline"


def test_a_message_larger_than_the_sockets_buffer(pair) -> None:
    ours, theirs = pair
    large = Plan(1, DIGEST, places=tuple((n, n) for n in range(100_000)))
    sender = threading.Thread(target=ours.send, args=(large, soon()))
    sender.start()
    assert theirs.receive(soon()) == large
    sender.join()


def test_who_does_not_read_is_given_up(pair) -> None:
    ours, _ = pair
    large = Plan(1, DIGEST, places=tuple((n, n) for n in range(100_000)))
    with pytest.raises(RankError, match="does not read"):
        for _ in range(100):
            ours.send(large, time.monotonic() + 0.1)


def test_who_is_gone_is_noticed_on_both_ways(pair) -> None:
    ours, theirs = pair
    ours.send(MESSAGES[4], soon())
    ours.close()
    assert theirs.receive(soon()) == MESSAGES[4], "what it said before still counts"
    with pytest.raises(RankError, match="gone"):
        theirs.receive(soon())
    with pytest.raises(RankError, match="gone"):
        for _ in range(3):
            theirs.send(MESSAGES[4], soon())


def test_a_descriptor_crosses_with_its_message_and_is_closed_if_nobody_takes_it(pair) -> None:
    ours, theirs = pair
    before = set(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("test")
    os.write(fd, b"bytes")
    ours.send(MESSAGES[1], soon(), fd=fd)
    ours.send(MESSAGES[1], soon(), fd=fd)
    os.close(fd)
    assert theirs.receive(soon()) == MESSAGES[1]
    taken = theirs.take_fd()
    assert os.pread(taken, 5, 0) == b"bytes"
    os.close(taken)
    assert theirs.receive(soon()) == MESSAGES[1]
    theirs.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert theirs.take_fd() is None


def test_nobody_listens(tmp_path) -> None:
    assert Channel.connect(str(tmp_path / "none.sock")) is None
