"""RedisWire: the few commands that kvkeep needs, spoken over a connection of the client library.

The library connects, authenticates, and knows where the servers are; it would copy a large value
several times on its way. Here a value goes from the pool to the socket in one vectored call, and
from the socket into the pool. RESP2, as `its specification <https://redis.io/docs/latest/develop/
reference/protocol-spec/>`_ says. One thread uses a wire, for one call; whatever goes wrong, the
connection is out of step then and must not be used again (fault 41): see ``is_in_step``.

PieceReader: reads large values from a Redis server piece by piece.

A server copies an answer before it sends it. Beyond 8 MiB the allocator of redis-server takes that
memory from the system each time and gives it back, and the first touch of fresh memory costs more
than everything else together (0.9 GB/s with values of 11 MiB, docs/performance.md). Pieces of 1 MiB
go through memory that stays in the processor's cache, and others are served in between.

    asked    STRLEN, piece 0 | piece 1 | ... | piece n-1 | header again | STRLEN, piece 0 (next)

A few answers are under way at a time. A value may be replaced or removed while its pieces are read:
then a piece is shorter, or the header, which has the checksum of the payload, is not the one that
was read first; the value is left unfinished, which is a miss and no damage. In I/O threads only.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.backends.remote.base import HEADER_BYTES, ValueSink
from kvkeep.backends.slow_tier import PIECE_BYTES
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


#: Pieces that were asked for and not read.
_AHEAD = 2


class PieceReader:
    """Reads some values over one connection, in order."""

    def __init__(
        self, wire: RedisWire, wanted: Sequence[tuple[str, ValueSink]], most_bytes: int
    ) -> None:
        """Nothing is asked for yet.

        Args:
            wire: the connection; it must not be used for anything else meanwhile.
            wanted: names, and where their values go.
            most_bytes: no larger value is read.
        """
        self._wire = wire
        self._wanted = wanted
        self._most_bytes = most_bytes
        self._num_begun = 0

    def read(self, number: int) -> ErrorReply | None:
        """Read the value of one name into its sink; call it for 0, 1, 2 and so on.

        Returns:
            The server's error, if that was its answer. The sink knows nothing of it.

        Raises:
            OSError: the connection failed, or is out of step.
        """
        self._begin(number)
        size, first = self._wire.read_reply(), self._read_part_size(PIECE_BYTES)
        if isinstance(first, ErrorReply):
            return size if isinstance(size, ErrorReply) else first
        if isinstance(size, ErrorReply):
            self._skip(first)
            return size
        if isinstance(size, str):
            raise ProtocolError(f"no size: {size[:40]!r}")
        sink = self._wanted[number][1]
        if 0 < size <= self._most_bytes and first == min(size, PIECE_BYTES):
            self._read_value(number, sink, size)
            return None
        self._skip(first)
        if size > self._most_bytes:
            sink.begin(b"", size)
        return None

    def _begin(self, number: int) -> None:
        """Ask for the size and the first piece of a value, if there is one, unless that was done.

        Of what is longer than a piece no more is asked for before its size is known.
        """
        if number == self._num_begun and number < len(self._wanted):
            self._num_begun += 1
            name = self._wanted[number][0]
            self._wire.send([command("STRLEN", name) + _range(name, 0, PIECE_BYTES)], 2)

    def _read_value(self, number: int, sink: ValueSink, size: int) -> None:
        """Read a value, of whose first piece the bytes are the next ones to come."""
        parts = _parts(size)
        asked = self._ask(number, parts, 0, 1)
        header = memoryview(bytearray(min(size, HEADER_BYTES)))
        self._wire.read_value(header)
        target = sink.begin(header, size)
        length = min(size, PIECE_BYTES) - len(header)
        if target is None:
            self._skip(length)
        else:
            self._wire.read_value(target[:length], sink.filled)
            self._wire.end_value()
        is_whole = target is not None
        for index, (start, length) in enumerate(parts):
            if is_whole:
                asked = self._ask(number, parts, asked, index + _AHEAD)
            if index == asked:
                return  # it is not whole, and nothing more of it was asked for
            if start:
                is_whole = self._read_piece(start - HEADER_BYTES, length, sink, target) and is_whole
            else:
                is_whole = self._has_header(header) and is_whole
        if is_whole:
            sink.finish()

    def _ask(self, number: int, parts: Sequence[tuple[int, int]], asked: int, upto: int) -> int:
        """Ask for the parts before ``upto``, and after the last one for the next value.

        Returns:
            How many parts are asked for, of which ``asked`` were before.
        """
        name, upto = self._wanted[number][0], min(upto, len(parts))
        if upto > asked:
            some = [_range(name, start, length) for start, length in parts[asked:upto]]
            self._wire.send([b"".join(some)], len(some))
        if upto == len(parts):
            self._begin(number + 1)
        return max(asked, upto)

    def _read_piece(
        self, start: int, length: int, sink: ValueSink, target: memoryview | None
    ) -> bool:
        """Read a piece of the payload that begins at ``start``; False if it is not as it should."""
        got = self._read_part_size(length)
        if isinstance(got, ErrorReply):
            return False
        if target is None or got != length:
            self._skip(got)
            return False
        self._wire.read_value(
            target[start : start + length], lambda done: sink.filled(start + done)
        )
        self._wire.end_value()
        return True

    def _has_header(self, header: memoryview) -> bool:
        """The value still has the header that was read first."""
        again = memoryview(bytearray(len(header)))
        got = self._read_part_size(len(header))
        if got != len(header):
            if isinstance(got, int):
                self._skip(got)
            return False
        self._wire.read_value(again)
        self._wire.end_value()
        return again == header

    def _read_part_size(self, most: int) -> int | ErrorReply:
        """The start of an answer of at most so many bytes; a server that has none says 0 bytes."""
        size = self._wire.read_size()
        if size is None:
            raise ProtocolError("nothing, where a part of a value was asked for")
        if isinstance(size, int) and size > most:
            raise ProtocolError(f"{size} bytes, where {most} were asked for")
        return size

    def _skip(self, size: int) -> None:
        """Read the rest of an answer, which nobody wants."""
        self._wire.read_value(memoryview(bytearray(size)))
        self._wire.end_value()


def _parts(size: int) -> list[tuple[int, int]]:
    """Where each part of a value begins that is asked for after its first piece, and its bytes.

    The last one is its header, again.
    """
    starts = range(PIECE_BYTES, size, PIECE_BYTES)
    pieces = [(start, min(PIECE_BYTES, size - start)) for start in starts]
    return [*pieces, (0, HEADER_BYTES)] if pieces else []


def _range(name: str, start: int, size: int) -> bytes:
    """The command for ``size`` bytes of a value from ``start`` on, or as many as it has."""
    return command("GETRANGE", name, start, start + size - 1)
