"""PieceReader: reads large values from a Redis server piece by piece.

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

from collections.abc import Sequence

from kvkeep.backends.io.pieces import PIECE_BYTES
from kvkeep.backends.remote.base import HEADER_BYTES, ValueSink
from kvkeep.backends.remote.redis_wire import ErrorReply, ProtocolError, RedisWire, command

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
