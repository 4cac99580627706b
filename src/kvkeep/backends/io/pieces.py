"""Pieces: how payloads are cut while they are moved and their checksum is taken. Pure.

A piece is moved, then its checksum is taken while it is still in the processor's cache (or the
other way round). Small pieces cost calls and turns at the interpreter's lock, large ones do not
stay in the cache (docs/performance.md has the figures).
"""

from __future__ import annotations

from collections.abc import Iterator

#: Bytes of a piece.
PIECE_BYTES = 1 << 20
#: Into how many pieces a large load is cut, and the largest of them.
_LOAD_PIECES, _MAX_LOAD_PIECE_BYTES = 4, 4 << 20


def load_piece_bytes(size_bytes: int) -> int:
    """Bytes of a piece of a chunk that somebody waits for.

    The engine's thread may spin meanwhile and hold the interpreter's lock, for which each piece
    waits twice. So there are few of them, as far as the cache allows.

    Args:
        size_bytes: of the chunk.

    Returns:
        A multiple of ``PIECE_BYTES``.
    """
    wanted = -(-size_bytes // (_LOAD_PIECES * PIECE_BYTES)) * PIECE_BYTES
    return min(_MAX_LOAD_PIECE_BYTES, max(PIECE_BYTES, wanted))


def pieces(
    buffer: memoryview, offset: int = 0, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[int, memoryview]]:
    """A buffer of bytes in pieces, each with its position in the buffer.

    Args:
        buffer: what is cut.
        offset: where it begins in the file that it is read from or written to. All pieces but the
            first begin at a multiple of ``piece_bytes`` there: two calls that share a page of the
            file cost more than two that do not. What a header has moved beyond the last multiple
            belongs to the last piece.
        piece_bytes: of a piece.
    """
    position, size = 0, len(buffer)
    while position < size:
        end = position + piece_bytes - (offset + position) % piece_bytes
        if size - end <= min(offset, piece_bytes // 2):
            end = size
        yield position, buffer[position:end]
        position = end
