"""The frame: a fixed header before the bytes of every chunk that leaves memory.

Disk and remote tiers write it, and check it at every read, so that a chunk is served only if it is
whole and the one that was asked for. Fixed binary form, little-endian, 256 bytes; a frame is a
header and its payload, back to back:

    offset  size  field
         0     8  magic, b"KVKCHUNK"
         8     2  version, 1
        10     2  header length, 256
        12     1  memory format: 1 KV_2LTD, 2 KV_T2D, 3 KV_2TD, 4 KV_MLA_FMT, 5 BINARY,
                  6 OPAQUE_PAGES
        13     1  element type: 1 float64, 2 float32, 3 float16, 4 bfloat16, 5 float8_e4m3fn,
                  6 float8_e5m2, 7 int8, 8 uint8
        14     1  codec of the payload: 0 raw, 1 zstd, 2 fp8, 3 int8
        15     1  number of dimensions, 1 to 8
        16     8  payload length in bytes, as stored
        24     8  length in bytes of the chunk in memory (the product of shape and element size)
        32    64  shape, eight numbers of 8 bytes; those not used are 0
        96    32  chunk key
       128    32  identity digest: CacheIdentity.digest() of the writer, without what a request adds
       160    16  XXH3-128 of the payload as stored, canonical (big-endian) form
       176    72  reserved, 0
       248     8  XXH3-64 of bytes 0 to 247

Every bit of a header is covered by its checksum, and every length in it is bounded before it is
used. The checksums find damage, not forgery: who can write into the directory is trusted with it.
Pure functions, callable from any thread.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

import xxhash

from kvkeep.errors import LayoutError
from kvkeep.hashing import ChunkKey
from kvkeep.identity import CacheIdentity
from kvkeep.layout import DTYPE_SIZES, MemoryFormat

#: Bytes from outside, or a chunk's memory.
Buffer = bytes | bytearray | memoryview

MAGIC = b"KVKCHUNK"
VERSION = 1
HEADER_BYTES = 256
DIGEST_BYTES = 32
CHECKSUM_BYTES = 16
MAX_DIMS = 8
#: No chunk is larger; a length above it is damage.
MAX_CHUNK_BYTES = 1 << 36
#: Codecs, see ``codec/base.py``. Only a raw payload is as long as the chunk; others are shorter.
CODEC_RAW, CODEC_ZSTD, CODEC_FP8, CODEC_INT8 = range(4)

_FORMATS = (
    MemoryFormat.KV_2LTD,
    MemoryFormat.KV_T2D,
    MemoryFormat.KV_2TD,
    MemoryFormat.KV_MLA_FMT,
    MemoryFormat.BINARY,
    MemoryFormat.OPAQUE_PAGES,
)
_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
)
_FORMAT_CODES = {fmt: code for code, fmt in enumerate(_FORMATS, start=1)}
_DTYPE_CODES = {name: code for code, name in enumerate(_DTYPES, start=1)}
_HEAD = struct.Struct("<8sHHBBBBQQ8Q32s32s16s72s")
_CHECK = struct.Struct("<Q")
_RESERVED = bytes(72)


class FrameFault(StrEnum):
    """Why a frame is not served: the cause under which the miss is counted."""

    TRUNCATED = "truncated"
    """Fewer bytes than a header, or than the header says."""
    NOT_A_FILE = "not_a_file"
    """Something else has the chunk's name: a directory, a link, a pipe."""
    MAGIC = "magic"
    """Not a frame at all."""
    VERSION = "version"
    """A frame of another version."""
    HEADER_CHECKSUM = "header_checksum"
    """A bit of the header changed."""
    FIELDS = "fields"
    """A field is out of bounds or contradicts another one."""
    LENGTH = "length"
    """More bytes than the header says."""
    WRONG_KEY = "wrong_key"
    """A whole frame of another chunk."""
    WRONG_IDENTITY = "wrong_identity"
    """A whole frame of another model, layout or rank under this chunk's name."""
    WRONG_LAYOUT = "wrong_layout"
    """Another shape, element type or format than this chunk was known to have."""
    PAYLOAD_CHECKSUM = "payload_checksum"
    """A bit of the payload changed."""
    CODEC = "codec"
    """The payload is as it was written, and its codec cannot have made it."""


@dataclass(frozen=True, slots=True)
class ChunkMeta:
    """What the bytes of a chunk are, in memory.

    Attributes:
        fmt: arrangement.
        dtype: name of the element type, a key of ``DTYPE_SIZES``.
        shape: logical shape.
    """

    fmt: MemoryFormat
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * DTYPE_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The content of a header.

    Attributes:
        key: the chunk.
        identity: digest of the writer's identity, 32 bytes; see :func:`writer_digest`.
        meta: what the chunk is in memory.
        payload_bytes: bytes that follow the header.
        payload_checksum: :func:`checksum` of those bytes, 16 bytes.
        codec: how they are encoded.
    """

    key: ChunkKey
    identity: bytes
    meta: ChunkMeta
    payload_bytes: int
    payload_checksum: bytes
    codec: int = CODEC_RAW

    def pack(self) -> bytes:
        """The 256 bytes.

        Raises:
            LayoutError: the chunk has a shape or type that a header cannot hold.
        """
        meta = self.meta
        if meta.dtype not in _DTYPE_CODES or not 1 <= len(meta.shape) <= MAX_DIMS:
            raise LayoutError(f"a frame cannot hold {meta.dtype} of shape {meta.shape}")
        if min(meta.shape) < 1 or meta.size_bytes > MAX_CHUNK_BYTES:
            raise LayoutError(f"a frame cannot hold a chunk of shape {meta.shape}")
        head = _HEAD.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            _FORMAT_CODES[meta.fmt],
            _DTYPE_CODES[meta.dtype],
            self.codec,
            len(meta.shape),
            self.payload_bytes,
            meta.size_bytes,
            *meta.shape,
            *(0,) * (MAX_DIMS - len(meta.shape)),
            self.key,
            self.identity,
            self.payload_checksum,
            _RESERVED,
        )
        return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


def parse_header(data: Buffer) -> FrameHeader | FrameFault:
    """Read a header from outside.

    Args:
        data: the first 256 bytes of a frame, or more; fewer are a TRUNCATED one.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        return FrameFault.TRUNCATED
    head = bytes(view[: HEADER_BYTES - _CHECK.size])
    fields = _HEAD.unpack(head)
    magic, version, header_bytes, fmt, dtype, codec, num_dims = fields[:7]
    payload_bytes, size_bytes = fields[7:9]
    if magic != MAGIC or version != VERSION:
        return FrameFault.MAGIC if magic != MAGIC else FrameFault.VERSION
    (check,) = _CHECK.unpack(view[len(head) : HEADER_BYTES])
    if check != xxhash.xxh3_64_intdigest(head):
        return FrameFault.HEADER_CHECKSUM
    shape, unused = fields[9 : 9 + num_dims], fields[9 + num_dims : 9 + MAX_DIMS]
    key, identity, payload_checksum, reserved = fields[9 + MAX_DIMS :]
    if (
        header_bytes != HEADER_BYTES
        or not 1 <= fmt <= len(_FORMATS)
        or not 1 <= dtype <= len(_DTYPES)
        or codec > CODEC_INT8
        or not 1 <= num_dims <= MAX_DIMS
        or any(unused)
        or reserved != _RESERVED
    ):
        return FrameFault.FIELDS
    meta = _meta(fmt, dtype, shape)
    least, most = (1, size_bytes - 1) if codec != CODEC_RAW else (size_bytes, size_bytes)
    is_bounded = 1 <= meta.size_bytes == size_bytes <= MAX_CHUNK_BYTES
    if not is_bounded or not least <= payload_bytes <= most:
        return FrameFault.FIELDS
    return FrameHeader(ChunkKey(key), identity, meta, payload_bytes, payload_checksum, codec)


@lru_cache(maxsize=256)
def _meta(fmt: int, dtype: int, shape: tuple[int, ...]) -> ChunkMeta:
    """What a chunk is, by the codes of a header: one object for the many chunks that are alike."""
    return ChunkMeta(_FORMATS[fmt - 1], _DTYPES[dtype - 1], shape)


def checksum(payload: Buffer) -> bytes:
    """XXH3-128 of a payload, canonical form. Releases the interpreter lock while it runs."""
    return xxhash.xxh3_128_digest(payload)


def new_hasher() -> xxhash.xxh3_128:
    """Takes :func:`checksum` piece by piece: ``update`` with each, then ``digest``."""
    return xxhash.xxh3_128()


def check_payload(header: FrameHeader, payload: Buffer) -> FrameFault | None:
    """What is wrong with the payload that followed ``header``; None if it is the one written."""
    if memoryview(payload).nbytes != header.payload_bytes:
        return FrameFault.TRUNCATED
    if checksum(payload) != header.payload_checksum:
        return FrameFault.PAYLOAD_CHECKSUM
    return None


def writer_digest(identity: CacheIdentity) -> bytes:
    """The identity digest of a writer's frames, 32 bytes.

    What a single request adds (salt, adapter, tags) is left out: it is in the chunk key, and two
    engines that reach one key by different ways share the chunk.
    """
    return replace(identity, salt="", lora="", tags=()).digest()
