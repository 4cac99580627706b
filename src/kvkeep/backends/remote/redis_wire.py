"""RedisWire: the few commands that kvkeep needs, spoken over a connection of the client library.

The library connects, authenticates, and knows where the servers are; it would copy a large value
several times on its way. Here a value goes from the pool to the socket in one vectored call, and
from the socket into the pool. RESP2, as `its specification <https://redis.io/docs/latest/develop/
reference/protocol-spec/>`_ says. One thread uses a wire, for one call; whatever goes wrong, the
connection is out of step then and must not be used again (fault 41): see ``is_in_step``.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.backends.io.pieces import PIECE_BYTES
from kvkeep.codec.frame import Buffer

#: What is read at once where the end of a line is looked for; no line is longer.
_BUFFER_BYTES = 16 * 1024
_CRLF = b"\r\n"


class ProtocolError(OSError):
    """The server says something that is no answer."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server's answer to one command is an error; the connection is in step all the same.

    Attributes:
        text: what it says.
    """

    text: str

    @property
    def code(self) -> str:
        """Its first word: ``OOM``, ``MOVED``, ``WRONGTYPE``, ``ERR``."""
        return self.text.partition(" ")[0]


def command(*words: str | bytes | int) -> bytes:
    """A small command as bytes."""
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)


def set_command(name: str, size_bytes: int, ttl_ms: int | None) -> tuple[bytes, bytes]:
    """What goes before and after a value of ``size_bytes`` bytes in the command that sets it."""
    after = (
        _CRLF if ttl_ms is None else b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms)
    )
    encoded = name.encode()
    head = b"*%d\r\n$3\r\nSET\r\n" % (3 if ttl_ms is None else 5)
    return head + b"$%d\r\n%b\r\n$%d\r\n" % (len(encoded), encoded, size_bytes), after


class RedisWire:
    """One connection during one call."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        """Speak over ``sock``, on which nothing is under way.

        Args:
            sock: connected, authenticated, plain or TLS.
            deadline: value of ``time.monotonic()`` after which everything raises TimeoutError.
        """
        self._sock = sock
        self._deadline = deadline
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0  # of what was read and not used
        self._expected = 0  # answers that have not come

    @property
    def is_in_step(self) -> bool:
        """Every answer was read, and not a byte more."""
        return self._expected == 0 and self._start == self._end

    def send(self, parts: Sequence[Buffer], num_commands: int) -> None:
        """Send commands, in as few system calls as the socket has it.

        Raises:
            OSError: not everything was sent; TimeoutError if because of the deadline.
        """
        self._expected += num_commands
        rest = [memoryview(part).cast("B") for part in parts if len(part)]
        if isinstance(self._sock, ssl.SSLSocket):  # has no vectored call
            for part in rest:
                self._set_timeout()
                self._sock.sendall(part)
            return
        while rest:
            self._set_timeout()
            sent = self._sock.sendmsg(rest[:64])
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][sent:]

    def read_reply(self) -> int | str | ErrorReply:
        """An answer that is a number, a status or an error.

        Raises:
            OSError: none came, or another kind of answer (ProtocolError).
        """
        kind, text = self._read_head()
        self._expected -= 1
        if kind == "-":
            return ErrorReply(text)
        if kind == "+":
            return text
        if kind == ":":
            return _number(text)
        raise ProtocolError(f"an unexpected answer: {kind}{text[:40]}")

    def read_size(self) -> int | ErrorReply | None:
        """The start of an answer that is a value: its size, None if there is none, or an error.

        After a size, :meth:`read_value` must read so many bytes in all, and then :meth:`end_value`.
        """
        kind, text = self._read_head()
        if kind == "-":
            self._expected -= 1
            return ErrorReply(text)
        if kind != "$":
            raise ProtocolError(f"an unexpected answer: {kind}{text[:40]}")
        size = _number(text)
        if size < -1:
            raise ProtocolError(f"a value of {size} bytes")
        if size == -1:
            self._expected -= 1
        return None if size == -1 else size

    def read_value(self, target: memoryview, filled: Callable[[int], None] | None = None) -> None:
        """Fill ``target`` with the next bytes of a value.

        Args:
            target: memory for them.
            filled: told after each piece how many bytes are in.
        """
        done = min(len(target), self._end - self._start)
        target[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        while done < len(target):
            done += self._receive(target[done : done + PIECE_BYTES])
            if filled is not None:
                filled(done)

    def end_value(self) -> None:
        """Read what stands behind a value."""
        if self._read_line():
            raise ProtocolError("a value is longer than its size")
        self._expected -= 1

    def _read_head(self) -> tuple[str, str]:
        line = self._read_line().decode("utf-8", "replace")
        if not line:
            raise ProtocolError("an empty answer")
        return line[0], line[1:]

    def _read_line(self) -> bytes:
        """The bytes up to the next end of a line."""
        while True:
            found = self._bytes.find(_CRLF, self._start, self._end)
            if found >= 0:
                line = bytes(self._buffer[self._start : found])
                self._start = found + len(_CRLF)
                return line
            rest = bytes(self._buffer[self._start : self._end])
            if len(rest) == _BUFFER_BYTES:
                raise ProtocolError("an answer without an end")
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
            self._end += self._receive(self._buffer[self._end :])

    def _receive(self, target: memoryview) -> int:
        self._set_timeout()
        count = self._sock.recv_into(target)
        if count == 0:
            raise ConnectionResetError("the server closed the connection")
        return count

    def _set_timeout(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(left_s)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError(f"no number: {text[:40]!r}") from None
