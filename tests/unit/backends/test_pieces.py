"""How payloads are cut while they are moved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.backends.slow_tier import PIECE_BYTES, load_piece_bytes, pieces
from kvkeep.codec.frame import HEADER_BYTES


@given(size=st.integers(0, 200), offset=st.integers(0, 100), piece_bytes=st.integers(1, 64))
def test_pieces_are_the_buffer_cut_at_multiples_in_the_file(size, offset, piece_bytes):
    data = bytes(range(200))[:size]
    found = list(pieces(memoryview(data), offset, piece_bytes))
    assert b"".join(piece for _, piece in found) == data
    assert [data[at : at + len(piece)] for at, piece in found] == [bytes(one) for _, one in found]
    assert all(0 < len(piece) <= piece_bytes for _, piece in found[:-1])
    assert all(0 < len(piece) <= piece_bytes + offset for _, piece in found[-1:])
    assert all((offset + at) % piece_bytes == 0 for at, _ in found[1:])


def test_what_a_header_moves_takes_no_call_of_its_own():
    """And no page of a chunk's file is touched by two calls."""
    sizes = [len(piece) for _, piece in pieces(memoryview(bytes(4 * PIECE_BYTES)), HEADER_BYTES)]
    assert sizes == [
        PIECE_BYTES - HEADER_BYTES,
        PIECE_BYTES,
        PIECE_BYTES,
        PIECE_BYTES + HEADER_BYTES,
    ]


@given(st.integers(1, 1 << 36))
def test_a_load_has_few_pieces_as_far_as_the_cache_allows(size):
    piece = load_piece_bytes(size)
    assert piece % PIECE_BYTES == 0
    assert PIECE_BYTES <= piece <= 4 * PIECE_BYTES
    assert piece * 4 >= size or piece == 4 * PIECE_BYTES
    assert piece == PIECE_BYTES or (piece - PIECE_BYTES) * 4 < size
