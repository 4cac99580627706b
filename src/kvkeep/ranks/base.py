"""What a group of ranks promises an engine. Start here.

All ranks of an engine load the same requests in the same order, and what one of them lacks is
worth nothing on the others. So each load is a round in which all ranks report how many chunks they
have written, and every rank gets the same answer: the minimum, or 0 where one of them is late,
gone or could not. There are two kinds of groups:

- each rank has KV of its own: it loads from its own tiers, and the round compares;
- the KV is the same on every rank (latent attention): rank 0 stores and loads, and the others copy
  what it loaded out of its pool, which they map.

A round that waits too long, or whose members die or are stopped in the middle, ends with 0 for all
of them: the outcome is decided in one place (``verdicts``), by whoever is first.

Rounds of one group follow each other. Every method may be called from any thread.

The ranks' wire: length-prefixed msgpack arrays over a Unix stream socket (docs/formats.md).

Every length is bounded; nothing is executed or unpickled. Pure data, usable from any thread.

Channel: messages over one Unix stream socket, with deadlines, and a descriptor beside them.

Used by one thread at a time. After an error the other side's messages can no longer be told apart,
so the channel is to be closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from kvkeep.errors import RankError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj

#: Between two looks for ranks that are waited for.
_LOOK_S = 0.01
#: Where a failure of another rank is counted: the ``tier`` of the metrics.
OTHER_RANKS = "ranks"


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Which group, and whose place in it.

    Attributes:
        socket: rank 0's Unix socket; its directory is private to the user. The verdicts stand in a
            directory beside it.
        rank: this one.
        num_ranks: all of them.
        shares_kv: rank 0's chunks are everybody's.
        timeout_s: how long a round waits for another rank.
        identity: 32 bytes that are equal on all ranks of an engine, and on no others.
    """

    socket: Path
    rank: int
    num_ranks: int
    shares_kv: bool
    timeout_s: float
    identity: bytes


class Round(ABC):
    """One load. It ends by exactly one of :meth:`conclude` and :meth:`abort`."""

    @property
    @abstractmethod
    def num_offered(self) -> int:
        """Chunks that rank 0 offers to the others; 0 where each rank loads its own."""

    @abstractmethod
    def borrow(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat
    ) -> MemoryObj | None:
        """An offered chunk in rank 0's memory, with a reference for the caller.

        It may only be read, and what was read counts only if :meth:`conclude` says so: if this
        rank is late, its bytes are another chunk's by now.

        Returns:
            None if there is none that is just as large.
        """

    @abstractmethod
    def conclude(self, written: int) -> int:
        """This rank has written its first ``written`` chunks; how many count, on every rank alike.

        Waits for the others, at most two timeouts. What was lent or borrowed must be held until
        this returns.
        """

    @abstractmethod
    def abort(self) -> None:
        """This rank gives the load up, so it is a miss on every rank. Does nothing after an end."""


class RankGroup(ABC):
    """The ranks of one engine, as seen by one of them.

    Attributes:
        shares_kv: rank 0's chunks are everybody's.
        is_first: this is rank 0.
    """

    shares_kv: bool
    is_first: bool

    @property
    def is_passive(self) -> bool:
        """This rank stores nothing: rank 0 does."""
        return self.shares_kv and not self.is_first

    @abstractmethod
    def is_whole(self) -> bool:
        """As far as this rank knows, all are there, so that a load can succeed; does not wait."""

    @abstractmethod
    def tend(self) -> None:
        """Look who has come or gone; does not wait."""

    def wait_until_whole(self, timeout_s: float) -> bool:
        """Wait for ranks that start at the same time as this one; whether all are there."""
        deadline = time.monotonic() + timeout_s
        while not self.is_whole():
            if time.monotonic() >= deadline:
                return False
            self.tend()
            time.sleep(_LOOK_S)
        return True

    @abstractmethod
    def open_round(self, tag: bytes, offered: Sequence[MemoryObj] = ()) -> Round | None:
        """Begin a load.

        Args:
            tag: 32 bytes that all ranks give to this load, and hardly to another one.
            offered: what rank 0 has, where it is everybody's.

        Returns:
            None if the load is a miss: the group is not whole, another rank gave it up or did not
            come, or rank 0 has nothing to offer.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group; a second call does nothing."""


#: Version of the messages; all ranks must speak the same one.
PROTOCOL = 1
#: A longer message is refused before its body is read.
MAX_MESSAGE_BYTES = 4 << 20
#: In front of each message: the length of its body.
PREFIX = struct.Struct("<I")

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
#: Where a chunk lies in rank 0's pool: offset and size in bytes.
Place = tuple[_Count, _Count]


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Every message starts with its tag."""


class Join(_Message, tag="join", frozen=True):
    """To rank 0: here is rank ``rank`` of an engine with this identity."""

    protocol: _Count
    rank: _Count
    num_ranks: _Count
    identity: _Digest


class Welcome(_Message, tag="welcome", frozen=True):
    """From rank 0, with the descriptor of its pool's memory if that has ``pool_bytes``."""

    session: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
    pool_bytes: _Count


class Plan(_Message, tag="plan", frozen=True):
    """From rank 0: round ``seq`` begins, or (``refused``) does not.

    Attributes:
        seq: number of the round.
        load: the tag of the load.
        refused: it is a miss.
        places: the chunks that rank 0 offers.
    """

    seq: _Count
    load: _Digest
    refused: bool = False
    places: Annotated[tuple[Place, ...], msgspec.Meta(max_length=1 << 17)] = ()


class Done(_Message, tag="done", frozen=True):
    """To rank 0: this rank has written so many chunks."""

    seq: _Count
    written: _Count


class Verdict(_Message, tag="verdict", frozen=True):
    """From rank 0: so many chunks count."""

    seq: _Count
    written: _Count


Message = Join | Welcome | Plan | Done | Verdict

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A message with its prefix."""
    body = _encoder.encode(message)
    return PREFIX.pack(len(body)) + body


def decode(body: bytes | bytearray | memoryview) -> Message:
    """A message from its body.

    Raises:
        RankError: it is none of this protocol.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RankError(f"malformed message of {len(body)} bytes: {error}") from error


def body_size(prefix: bytes | bytearray | memoryview) -> int:
    """The length of the body that comes after this prefix.

    Raises:
        RankError: it is longer than a message may be.
    """
    size: int = PREFIX.unpack(prefix)[0]
    if size > MAX_MESSAGE_BYTES:
        raise RankError(f"a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return size


_READ_BYTES = 64 << 10
#: Descriptors taken with one read; a peer that sends more gets the others closed by the system.
_MAX_FDS = 4


class Channel:
    """One connection to another rank."""

    def __init__(self, sock: socket.socket) -> None:
        """Own ``sock``, which is connected."""
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    @classmethod
    def connect(cls, path: str) -> Channel | None:
        """Connect without waiting; None if nobody listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            return None
        return cls(sock)

    def send(self, message: Message, deadline: float, *, fd: int | None = None) -> None:
        """Send a message, and a descriptor with its first byte.

        Args:
            message: what.
            deadline: value of ``time.monotonic()``.
            fd: the descriptor; stays the caller's.

        Raises:
            RankError: the other side is gone or does not read.
        """
        data = memoryview(encode(message))
        while data:
            try:
                if fd is None:
                    sent = self._sock.send(data)
                else:
                    sent, fd = socket.send_fds(self._sock, [data], [fd]), None
                data = data[sent:]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    raise RankError("another rank does not read") from None
            except OSError as error:
                raise RankError(f"another rank is gone: {error}") from error

    def receive(self, deadline: float) -> Message | None:
        """The next message; None if it has not come by ``deadline``.

        What has arrived is read also after the deadline, for a process that was stopped meanwhile.

        Raises:
            RankError: the other side is gone, or it was no message.
        """
        while True:
            message = self._parse()
            if message is not None:
                return message
            try:
                data, fds, _, _ = socket.recv_fds(
                    self._sock, _READ_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                if not self._wait(select.POLLIN, deadline):
                    return None
                continue
            except OSError as error:
                raise RankError(f"another rank is gone: {error}") from error
            self._fds += fds
            if not data:
                raise RankError("another rank is gone")
            self._buffer += data

    def take_fd(self) -> int | None:
        """The oldest descriptor that came; it is the caller's now."""
        return self._fds.pop(0) if self._fds else None

    def fileno(self) -> int:
        """For polling."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket and descriptors that nobody took; a second call does nothing."""
        self._sock.close()
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.pop())

    def _parse(self) -> Message | None:
        """A whole message from the buffer, if there is one."""
        if len(self._buffer) < PREFIX.size:
            return None
        end = PREFIX.size + body_size(self._buffer[: PREFIX.size])
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[PREFIX.size : end])
        del self._buffer[:end]
        return decode(body)

    def _wait(self, event: int, deadline: float) -> bool:
        """Until the socket is ready; False if the deadline passes first."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        poller = select.poll()
        poller.register(self._sock, event)
        poller.poll(left_s * 1000 + 1)
        return True
