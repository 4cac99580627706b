"""The frame: a golden vector, and that no changed bit and no foreign frame gets through."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.codec.frame import (
    HEADER_BYTES,
    ChunkMeta,
    FrameFault,
    FrameHeader,
    check_payload,
    checksum,
    parse_header,
    writer_digest,
)
from kvkeep.errors import LayoutError
from kvkeep.hashing import ChunkKey
from kvkeep.layout import DTYPE_SIZES, MemoryFormat
from support.disk import IDENTITY

KEY = ChunkKey(bytes(range(32)))
PAYLOAD = bytes(range(256)) * 3
HEADER = FrameHeader(
    KEY,
    bytes(range(100, 132)),
    ChunkMeta(MemoryFormat.OPAQUE_PAGES, "uint8", (3, 4, 64)),
    len(PAYLOAD),
    checksum(PAYLOAD),
)
#: Written down once: a change of them is a change of the format and needs a new version.
GOLDEN_PAYLOAD_CHECKSUM = "a9ee10cbf43517e44066a57f4496584a"
GOLDEN_HEADER_CHECKSUM = "e5d48250f70ed42d"


def test_golden_vector():
    """The header of a known chunk, byte by byte as docs/formats.md says."""
    expected = (
        b"KVKCHUNK"
        + bytes.fromhex("0100000106080003")
        + (768).to_bytes(8, "little") * 2
        + b"".join(n.to_bytes(8, "little") for n in (3, 4, 64, 0, 0, 0, 0, 0))
        + KEY
        + bytes(range(100, 132))
        + bytes.fromhex(GOLDEN_PAYLOAD_CHECKSUM)
        + bytes(72)
        + bytes.fromhex(GOLDEN_HEADER_CHECKSUM)
    )
    assert HEADER.pack() == expected
    assert len(expected) == HEADER_BYTES == 256


def test_every_single_bit_of_a_header():
    """Fault 5: whichever bit changes, the header is refused."""
    packed = HEADER.pack()
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert isinstance(parse_header(damaged), FrameFault), bit


def test_every_truncation():
    packed = HEADER.pack()
    for length in range(HEADER_BYTES):
        assert parse_header(packed[:length]) is FrameFault.TRUNCATED
    assert parse_header(packed + b"more") == HEADER


OUT_OF_BOUNDS = [(10, 255), (12, 0), (12, 7), (13, 0), (13, 9), (14, 4), (15, 0), (15, 9)]
CONTRADICTING = [(16, 1), (24, 1), (39, 255), (56, 1), (176, 1), (247, 1)]


@pytest.mark.parametrize(("position", "value"), OUT_OF_BOUNDS + CONTRADICTING)
def test_fields_out_of_bounds_with_a_right_checksum(position, value):
    """A header is bounded also when its checksum is right."""
    head = bytearray(HEADER.pack()[:248])
    head[position] = value
    packed = bytes(head) + xxhash.xxh3_64_intdigest(bytes(head)).to_bytes(8, "little")
    assert parse_header(packed) is FrameFault.FIELDS


def test_other_magic_and_version_have_their_own_names():
    packed = HEADER.pack()
    assert parse_header(b"X" + packed[1:]) is FrameFault.MAGIC
    assert parse_header(packed[:8] + b"\2\0" + packed[10:]) is FrameFault.VERSION


@pytest.mark.parametrize("codec", [1, 2, 3])
def test_an_encoded_payload_is_shorter_than_its_chunk(codec):
    """So that its length bounds what is read before anything is decoded."""
    for length in (1, HEADER.meta.size_bytes - 1):
        header = replace(HEADER, codec=codec, payload_bytes=length)
        assert parse_header(header.pack()) == header
    for length in (0, HEADER.meta.size_bytes, HEADER.meta.size_bytes + 1, 1 << 62):
        packed = replace(HEADER, codec=codec, payload_bytes=length).pack()
        assert parse_header(packed) is FrameFault.FIELDS


@pytest.mark.parametrize("length", [0, 1, 767, 769])
def test_a_raw_payload_is_as_long_as_its_chunk(length):
    assert parse_header(replace(HEADER, payload_bytes=length).pack()) is FrameFault.FIELDS


@given(st.binary(max_size=600))
def test_bytes_from_outside(data):
    """Whatever arrives, the answer is a header or a fault."""
    assert isinstance(parse_header(data), FrameFault)


@given(
    fmt=st.sampled_from(list(MemoryFormat)),
    dtype=st.sampled_from(list(DTYPE_SIZES)),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
    key=st.binary(min_size=32, max_size=32),
)
def test_round_trip(fmt, dtype, shape, key):
    meta = ChunkMeta(fmt, dtype, shape)
    header = FrameHeader(ChunkKey(key), bytes(32), meta, meta.size_bytes, bytes(16))
    assert parse_header(header.pack()) == header


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("int64", (1,)), ("uint8", ()), ("uint8", (1,) * 9), ("uint8", (0, 2)), ("uint8", (1 << 37,))],
)
def test_a_chunk_that_no_header_can_hold(dtype, shape):
    meta = ChunkMeta(MemoryFormat.BINARY, dtype, shape)
    with pytest.raises(LayoutError):
        replace(HEADER, meta=meta).pack()


def test_the_payload_is_checked_whole():
    """Fault 5: right length, wrong content; and a truncated payload."""
    assert check_payload(HEADER, PAYLOAD) is None
    assert check_payload(HEADER, PAYLOAD[:-1]) is FrameFault.TRUNCATED
    for position in range(0, len(PAYLOAD), 7):
        damaged = bytearray(PAYLOAD)
        damaged[position] ^= 1 << position % 8
        assert check_payload(HEADER, damaged) is FrameFault.PAYLOAD_CHECKSUM


def test_the_writers_digest_leaves_out_what_a_request_adds():
    """What two engines reach by different ways under one key is one chunk."""
    digest = writer_digest(IDENTITY)
    by_request = IDENTITY.for_request(salt="a", lora="b", request_configs={"kvkeep.tag.c": "d"})
    assert writer_digest(by_request) == digest
    assert writer_digest(replace(IDENTITY, revision="2")) != digest
    assert writer_digest(replace(IDENTITY, rank=1, world_size=2)) != digest
