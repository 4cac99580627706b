"""Pieces: how payloads are cut while they are moved and their checksum is taken. Pure.

A piece is moved, then its checksum is taken while it is still in the processor's cache (or the
other way round). Small pieces cost calls and turns at the interpreter's lock, large ones do not
stay in the cache (docs/performance.md has the figures).
"""

from __future__ import annotations

from collections.abc import Iterator

#: Bytes of a piece.
PIECE_BYTES = 1 << 20


def pieces(buffer: memoryview, offset: int = 0) -> Iterator[tuple[int, memoryview]]:
    """A buffer of bytes in pieces, each with its position in the buffer.

    Args:
        buffer: what is cut.
        offset: where it begins in the file that it is read from or written to. All pieces but the
            first begin at a multiple of ``PIECE_BYTES`` there: two calls that share a page of the
            file cost more than two that do not. What a header has moved beyond the last multiple
            belongs to the last piece.
    """
    position, size = 0, len(buffer)
    while position < size:
        end = position + PIECE_BYTES - (offset + position) % PIECE_BYTES
        if size - end <= min(offset, PIECE_BYTES // 2):
            end = size
        yield position, buffer[position:end]
        position = end
