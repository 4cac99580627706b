"""RawCodec: the bytes as they are in memory, without a copy.

ZstdCodec: the same bytes, compressed by Zstandard. Lossless.

KV looks like noise to a compressor until the parts of its elements are taken apart: exponents are
alike, mantissas are not. So the highest bytes of all elements, the second highest and so on are
compressed apart, each such plane on its own. A plane that does not get shorter stays as it is;
mantissas are not even tried (a sample of them decides). The payload, little-endian:

    offset  size  field
         0     1  width W of an element in bytes: 1, 2, 4 or 8
         1     3  reserved, 0
         4     4  length of a block in bytes, 1,048,576
         8        the blocks of the chunk, the last of which may be shorter; of each, W planes, from
                  the lowest bytes to the highest; of each plane 4 bytes and its data

The 4 bytes are the length of the data; the highest bit says that the data is the plane as it is,
else it is one Zstandard frame that holds the plane's length and has no dictionary.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import zstandard

from kvkeep.codec.base import Codec
from kvkeep.codec.frame import CODEC_RAW, CODEC_ZSTD, Buffer, ChunkMeta
from kvkeep.errors import CodecError
from kvkeep.layout import DTYPE_SIZES


class RawCodec(Codec):
    """No encoding."""

    name = "raw"
    code = CODEC_RAW

    def encode(self, payload: Buffer, meta: ChunkMeta) -> Buffer:
        """``payload`` itself."""
        return payload

    def decode(self, encoded: Buffer, out: memoryview, meta: ChunkMeta) -> None:
        """One copy."""
        source, target = memoryview(encoded).cast("B"), out.cast("B")
        if source.nbytes != target.nbytes:
            raise CodecError(f"{source.nbytes} raw bytes for a chunk of {target.nbytes}")
        target[:] = source


Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 1 << 20
#: For planes: hardly any search for repetitions, of which exponents have none. It is nearly three
#: times as fast as level 1 and as short, to within a hundredth; higher levels are only slower.
_PLANES = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, write_content_size=True
)
#: For bytes of which nothing is known.
_BYTES = zstandard.ZstdCompressionParameters.from_level(1, write_content_size=True)
#: Of a plane, what is tried first, and how short it must get to try the rest.
SAMPLE_BYTES, WORTH = 1 << 14, 0.95
_HEAD = struct.Struct("<B3xI")
_LENGTH = struct.Struct("<I")
_AS_IT_IS = 1 << 31
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class ZstdCodec(Codec):
    """Zstandard over planes of bytes."""

    name = "zstd"
    code = CODEC_ZSTD

    def __init__(self, element: str | None = None) -> None:
        """For any chunk.

        Args:
            element: element type of opaque pages, which a chunk does not say; None if unknown.
        """
        self._element = element

    def encode(self, payload: Buffer, meta: ChunkMeta) -> Buffer | None:
        """See the interface."""
        source = np.frombuffer(payload, np.uint8)
        dtype = self._element if meta.dtype == "uint8" and self._element else meta.dtype
        width = DTYPE_SIZES[dtype]
        if len(source) % width:
            width = 1
        parts: list[bytes | memoryview] = [_HEAD.pack(width, BLOCK_BYTES)]
        compressor = zstandard.ZstdCompressor(compression_params=_PLANES if width > 1 else _BYTES)
        for start in range(0, len(source), BLOCK_BYTES):
            for plane in _planes(source[start : start + BLOCK_BYTES], width):
                data = _compressed(compressor, plane)
                if data is None:
                    parts += [_LENGTH.pack(len(plane) | _AS_IT_IS), plane.data]
                else:
                    parts += [_LENGTH.pack(len(data)), data]
        return b"".join(parts)

    def decode(self, encoded: Buffer, out: memoryview, meta: ChunkMeta) -> None:
        """See the interface."""
        source, target = memoryview(encoded).cast("B"), np.frombuffer(out, np.uint8)
        if len(source) < _HEAD.size:
            raise CodecError("a zstd payload without a head")
        width, block_bytes = _HEAD.unpack_from(source)
        if width not in _WORDS or block_bytes != BLOCK_BYTES or len(target) % width:
            raise CodecError(f"no zstd payload for {len(target)} bytes")
        position = _HEAD.size
        decompressor = zstandard.ZstdDecompressor()
        for start in range(0, len(target), BLOCK_BYTES):
            block = target[start : start + BLOCK_BYTES]
            planes = []
            for _ in range(width):
                plane, position = _read_plane(decompressor, source, position, len(block) // width)
                planes.append(plane)
            _join(planes, block, width)
        if position != len(source):
            raise CodecError("a zstd payload is longer than its chunk")


def _planes(block: Bytes, width: int) -> Iterator[Bytes]:
    """The lowest bytes of all elements of a block, then the next higher ones, and so on."""
    if width == 1:
        yield block
        return
    unit = _WORDS[width]
    words = block.view(unit)
    for number in range(width):
        yield (words >> unit(8 * number)).astype(np.uint8)


def _join(planes: list[Bytes], block: Bytes, width: int) -> None:
    """Undo :func:`_planes`, into ``block``."""
    if width == 1:
        block[:] = planes[0]
        return
    unit = _WORDS[width]
    words = block.view(unit)
    np.copyto(words, planes[-1])
    for plane in reversed(planes[:-1]):
        words <<= unit(8)
        words |= plane


def _compressed(compressor: zstandard.ZstdCompressor, plane: Bytes) -> bytes | None:
    """One Zstandard frame, or None if it would not be shorter, as a sample says."""
    if len(plane) > 4 * SAMPLE_BYTES:
        middle = len(plane) // 2
        sample = compressor.compress(plane[middle : middle + SAMPLE_BYTES].data)
        if len(sample) > WORTH * SAMPLE_BYTES:
            return None
    data = compressor.compress(plane.data)
    return data if len(data) < len(plane) else None


def _read_plane(
    decompressor: zstandard.ZstdDecompressor, source: memoryview, position: int, size: int
) -> tuple[Bytes, int]:
    """One plane of ``size`` bytes, and where the next one starts."""
    begin = position + _LENGTH.size
    if begin > len(source):
        raise CodecError("a zstd payload ends within a length")
    (length,) = _LENGTH.unpack_from(source, position)
    is_plain = bool(length & _AS_IT_IS)
    end = begin + (length & ~_AS_IT_IS)
    data = source[begin:end]
    if end > len(source) or (is_plain and len(data) != size):
        raise CodecError("a plane of a zstd payload has a wrong length")
    if is_plain:
        return np.frombuffer(data, np.uint8), end
    try:
        # The frame's own claim is what the library allocates, so it is checked first.
        if zstandard.frame_content_size(data) != size:
            raise CodecError("a plane of a zstd payload claims another size")
        plain = decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"a plane of a zstd payload: {error}") from error
    if len(plain) != size:
        raise CodecError("a plane of a zstd payload has another size")
    return np.frombuffer(plain, np.uint8), end
