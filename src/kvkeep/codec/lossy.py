"""Fp8Codec: 8-bit floats (e4m3) in blocks of 32 elements that share a power of two. Lossy.

These are the MXFP8 numbers of the OCP Microscaling Formats (MX) specification 1.0, but that the
shared power of two is rounded up, so that no element is cut off at 448. Each element keeps 4
significant bits, whatever else is in its block, as long as it is not 28,672 times smaller than the
largest one there. So it matters not which elements are neighbours, and whole pages of an engine can
be encoded whose order is unknown. The payload, little-endian:

    offset  size     field
         0     1     element type: 2 float32, 3 float16, 4 bfloat16, as in the frame's header
         1     1     5: a block has 2 to the power of 5 elements
         2     6     reserved, 0
         8     B     one byte E per block: its elements are multiples of 2^(E - 127)
     8 + B     N     one e4m3 number per element, in the order of memory; never 0x7f or 0xff

N is the number of elements and B that of blocks, N / 32 rounded up; the last block may be shorter.

Int8Codec: 8-bit integers with a scale per channel. Lossy.

A channel is one of the numbers that a token has in one layer, in K or in V; over the tokens of a
chunk its values are of one size, while those of different channels are not. So each channel's
largest value becomes 127. It needs to know the channels and does not take opaque pages. The
payload, little-endian:

    offset   size   field
         0      1   element type: 2 float32, 3 float16, 4 bfloat16, as in the frame's header
         1      7   reserved, 0
         8    4 C   a float32 per channel: the value of 1; planes in the order of memory, in each
                    its channels
    8 + 4 C     N   a signed number per element, -127 to 127, in the order of memory

A plane is what one layer has of K or of V (of both together in KV_T2D); N is the number of elements
and C that of planes times channels.

Floats of 16 and 32 bits as numpy arrays: numpy knows no bfloat16, and lossy codecs need it.

Pure functions over pieces of a chunk, small enough to stay in the processor's cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.codec.base import Codec
from kvkeep.codec.frame import CODEC_FP8, CODEC_INT8, Buffer, ChunkMeta
from kvkeep.errors import CodecError
from kvkeep.layout import DTYPE_SIZES, KVLayout, MemoryFormat

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

#: Element types that lossy codecs take, by the code that a frame's header has for them.
FLOAT_CODES = {"float32": 2, "float16": 3, "bfloat16": 4}
FLOAT_NAMES = {code: name for name, code in FLOAT_CODES.items()}
#: Elements of one piece.
PIECE_ELEMENTS = 1 << 18


def bits_of(data: npt.NDArray[np.uint8], dtype: str) -> Bits:
    """The bit patterns of elements; a view, writable if ``data`` is."""
    return data.view(np.uint32) if dtype == "float32" else data.view(np.uint16)


def to_float32(bits: Bits, dtype: str) -> Floats:
    """Elements of ``dtype`` as float32, exact. ``bits`` has their bit patterns, any shape."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(values: Floats, dtype: str, out: Bits) -> None:
    """Write float32 as elements of ``dtype``, rounded to nearest even.

    Args:
        values: any shape; may be changed.
        dtype: of ``out``. What is too large for a float16 becomes the largest one.
        out: bit patterns, the same shape.
    """
    if dtype == "float32":
        np.copyto(out.view(np.float32), values)
    elif dtype == "float16":
        np.clip(values, -65504.0, 65504.0, out=values)
        np.copyto(out.view(np.float16), values, casting="same_kind")
    else:
        bits = values.view(np.uint32)
        bits += ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        bits >>= np.uint32(16)
        np.copyto(out, bits, casting="unsafe")


Bytes = npt.NDArray[np.uint8]

BLOCK_LOG, BLOCK = 5, 32
HEADER_BYTES = 8
#: The smallest shared exponent: with it, elements that are no normal numbers are rounded as floats.
_MIN_EXPONENT = 8
#: Blocks with larger elements are not encoded: what is decoded might not be finite.
_MAX_FLOAT_EXPONENT = 253


@dataclass(frozen=True, slots=True)
class _Piece:
    """Memory to work in, which is taken once per chunk: fresh memory is slow to touch.

    Attributes:
        mantissa: bits of an element's mantissa.
        first: as many unsigned integers as a piece has elements, as wide as they are.
        second: likewise.
        flags: as many bools.
    """

    mantissa: int
    first: npt.NDArray[Any]
    second: npt.NDArray[Any]
    flags: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, dtype: str, num: int) -> _Piece:
        """For chunks of ``num`` elements. A float16 is worked on as a float32, exactly."""
        size = min(-(-num // BLOCK) * BLOCK, PIECE_ELEMENTS)
        wide = np.uint16 if dtype == "bfloat16" else np.uint32
        parts = np.empty(size, wide), np.empty(size, wide)
        return cls(7 if dtype == "bfloat16" else 23, *parts, np.empty(size, np.bool_))

    def cut(self, num: int) -> _Piece:
        """For a shorter piece of ``num`` elements, rounded up to whole blocks."""
        size = -(-num // BLOCK) * BLOCK
        return replace(
            self, first=self.first[:size], second=self.second[:size], flags=self.flags[:size]
        )


class Fp8Codec(Codec):
    """e4m3 with a scale per block."""

    name = "fp8"
    code = CODEC_FP8
    lossy = True

    def __init__(self, element: str | None = None) -> None:
        """For chunks whose elements are floats.

        Args:
            element: element type of opaque pages, which a chunk does not say; None if unknown, and
                opaque pages are then kept raw.
        """
        self._element = element

    def why_not(self, layout: KVLayout) -> str | None:
        """Its elements must be known, and floats of 16 or 32 bits."""
        dtype = self._element if layout.dtype == "uint8" else layout.dtype
        if dtype in FLOAT_CODES:
            return None
        return f"its elements are {dtype or 'unknown'}, and fp8 takes {', '.join(FLOAT_CODES)}"

    def encode(self, payload: Buffer, meta: ChunkMeta) -> Buffer | None:
        """See the interface; a chunk with values that are not finite is kept raw."""
        dtype = self._element if meta.dtype == "uint8" else meta.dtype
        source = np.frombuffer(payload, np.uint8)
        if dtype not in FLOAT_CODES or len(source) % DTYPE_SIZES[dtype]:
            return None
        bits = bits_of(source, dtype)
        num_blocks = -(-len(bits) // BLOCK)
        encoded = np.empty(HEADER_BYTES + num_blocks + len(bits), np.uint8)
        encoded[:HEADER_BYTES] = (FLOAT_CODES[dtype], BLOCK_LOG, 0, 0, 0, 0, 0, 0)
        exponents = encoded[HEADER_BYTES : HEADER_BYTES + num_blocks]
        codes = encoded[HEADER_BYTES + num_blocks :]
        work = _Piece.of(dtype, len(bits))
        for start in range(0, len(bits), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            blocks = slice(start // BLOCK, (start + PIECE_ELEMENTS) // BLOCK)
            words = (
                to_float32(bits[piece], dtype).view(np.uint32)
                if dtype == "float16"
                else bits[piece]
            )
            if not _encode_piece(words, work.cut(len(words)), exponents[blocks], codes[piece]):
                return None
        return encoded.data

    def decode(self, encoded: Buffer, out: memoryview, meta: ChunkMeta) -> None:
        """See the interface."""
        source, target = np.frombuffer(encoded, np.uint8), np.frombuffer(out, np.uint8)
        dtype = FLOAT_NAMES.get(int(source[0])) if len(source) >= HEADER_BYTES else None
        if dtype is None or meta.dtype not in (dtype, "uint8"):
            raise CodecError(f"no fp8 payload of {meta.dtype}")
        num, rest = divmod(len(target), DTYPE_SIZES[dtype])
        num_blocks = -(-num // BLOCK)
        if (
            rest
            or int(source[1]) != BLOCK_LOG
            or source[2:HEADER_BYTES].any()
            or len(source) != HEADER_BYTES + num_blocks + num
        ):
            raise CodecError(f"no fp8 payload for {num} elements")
        exponents = source[HEADER_BYTES : HEADER_BYTES + num_blocks]
        codes, bits = source[HEADER_BYTES + num_blocks :], bits_of(target, dtype)
        work = _Piece.of(dtype, num)
        for start in range(0, num, PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            blocks = slice(start // BLOCK, (start + PIECE_ELEMENTS) // BLOCK)
            count = len(codes[piece])
            words = _decode_piece(exponents[blocks], codes[piece], work.cut(count))[:count]
            if dtype == "float16":
                from_float32(words.view(np.float32), dtype, bits[piece])
            else:
                np.copyto(bits[piece], words)


def _encode_piece(bits: Bits, work: _Piece, exponents: Bytes, codes: Bytes) -> bool:
    """Encode whole blocks, the last of which may be short; False if a value is too large for it."""
    num, mantissa, drop = len(bits), work.mantissa, work.mantissa - 3
    unit, signed = bits.dtype.type, np.int16 if bits.itemsize == 2 else np.int32
    width = 8 * bits.itemsize
    magnitudes, other = work.first, work.second
    magnitudes[num:] = 0
    np.bitwise_and(bits, unit((1 << (width - 1)) - 1), out=magnitudes[:num])
    np.copyto(other.reshape(BLOCK, -1), magnitudes.reshape(-1, BLOCK).T)
    largest = other.reshape(BLOCK, -1).max(axis=0).astype(np.int64)
    if int(largest.max(initial=0)) >> mantissa > _MAX_FLOAT_EXPONENT:
        return False
    # The power of two 2^(E - 127) with which the largest element is at most 448 = 1.75 * 2^8.
    shared = ((largest + (1 << (mantissa - 2)) - 1) >> mantissa) - 8
    np.clip(shared, _MIN_EXPONENT, None, out=shared)
    exponents[:] = shared
    # Numbers in the form of e4m3, but with all bits of their mantissa, where that is normal.
    scaled: npt.NDArray[Any] = magnitudes.view(signed)
    rounding: npt.NDArray[Any] = other.view(signed)
    shifted: npt.NDArray[Any] = scaled.reshape(-1, BLOCK)
    shifted += ((7 - shared) << mantissa).astype(signed)[:, None]
    np.less(scaled, signed(1 << mantissa), out=work.flags)
    small = np.flatnonzero(work.flags[:num])
    np.right_shift(scaled, signed(drop), out=rounding)
    rounding &= signed(1)
    scaled += rounding
    scaled += signed((1 << (drop - 1)) - 1)
    scaled >>= signed(drop)
    if len(small):
        floats = np.abs(_float32(bits[small]))
        steps = np.ldexp(floats, 136 - shared[small // BLOCK])  # in units of the smallest, 2^-9
        scaled[small] = np.rint(steps).astype(signed)
    signs = other[:num]
    np.right_shift(bits, unit(width - 8), out=signs)
    signs &= unit(0x80)
    signs |= magnitudes[:num]
    np.copyto(codes, signs, casting="unsafe")
    return True


def _decode_piece(exponents: Bytes, codes: Bytes, work: _Piece) -> Bits:
    """The bit patterns of whole blocks, the last of which may be short; they lie in ``work``."""
    num, mantissa, drop = len(codes), work.mantissa, work.mantissa - 3
    words, signs = work.first, work.second
    unit, signed = words.dtype.type, np.int16 if words.itemsize == 2 else np.int32
    words[num:] = 0
    np.bitwise_and(codes, np.uint8(0x7F), out=words[:num], casting="unsafe")
    if int(words.max(initial=0)) == 0x7F:
        raise CodecError("an fp8 payload has a number that is none")
    np.less(words, unit(8), out=work.flags)  # zeros, and numbers that are not normal
    small = np.flatnonzero(work.flags[:num])
    words <<= unit(drop)
    shift = (exponents.astype(np.int64) - 7) << mantissa
    shifted: npt.NDArray[Any] = words.view(signed).reshape(-1, BLOCK)
    shifted += shift.astype(signed)[:, None]
    if len(small):
        steps = (codes[small] & np.uint8(7)).astype(np.float32)
        floats = np.ldexp(steps, exponents[small // BLOCK].astype(np.int32) - 136)
        words[small] = floats.view(np.uint32) >> np.uint32(23 - mantissa)
    np.bitwise_and(codes, np.uint8(0x80), out=signs[:num], casting="unsafe")
    signs[:num] <<= unit(8 * words.itemsize - 8)
    words[:num] |= signs[:num]
    return words


def _float32(bits: Bits) -> Floats:
    """Elements as float32: those of 16 bits are bfloat16."""
    return to_float32(bits, "bfloat16" if bits.itemsize == 2 else "float32")


#: Channels with larger values are not encoded: what is decoded might not be finite.
_MAX_VALUE = 1e38


def planes_of(meta: ChunkMeta) -> tuple[int, int, int] | None:
    """(planes, tokens, channels) of a chunk as it is in memory; None if that is unknown."""
    shape = meta.shape
    match meta.fmt, len(shape):
        case ((MemoryFormat.KV_2LTD | MemoryFormat.KV_MLA_FMT), 4):
            return shape[0] * shape[1], shape[2], shape[3]
        case MemoryFormat.KV_T2D, 3:
            return 1, shape[0], shape[1] * shape[2]
        case MemoryFormat.KV_2TD, 3:
            return shape[0], shape[1], shape[2]
    return None


class Int8Codec(Codec):
    """int8 with a scale per channel."""

    name = "int8"
    code = CODEC_INT8
    lossy = True

    def why_not(self, layout: KVLayout) -> str | None:
        """Its channels must be known, and floats of 16 or 32 bits."""
        if layout.fmt is MemoryFormat.OPAQUE_PAGES:
            return (
                "the channels inside of an engine's pages are unknown to it; fp8 needs no channels"
            )
        if layout.dtype not in FLOAT_CODES:
            return f"its elements are {layout.dtype}, and int8 takes {', '.join(FLOAT_CODES)}"
        return None

    def encode(self, payload: Buffer, meta: ChunkMeta) -> Buffer | None:
        """See the interface; a chunk with values that are not finite is kept raw."""
        form = planes_of(meta)
        if form is None or meta.dtype not in FLOAT_CODES:
            return None
        num_planes, _, num_channels = form
        bits = bits_of(np.frombuffer(payload, np.uint8), meta.dtype).reshape(form)
        scale_bytes = 4 * num_planes * num_channels
        encoded = np.empty(HEADER_BYTES + scale_bytes + bits.size, np.uint8)
        encoded[:HEADER_BYTES] = (FLOAT_CODES[meta.dtype], 0, 0, 0, 0, 0, 0, 0)
        scales = encoded[HEADER_BYTES : HEADER_BYTES + scale_bytes].view("<f4")
        scales = scales.reshape(num_planes, num_channels)
        numbers = encoded[HEADER_BYTES + scale_bytes :].view(np.int8).reshape(form)
        for plane in range(num_planes):
            values = to_float32(bits[plane], meta.dtype)
            largest = np.abs(values).max(axis=0)
            if not float(largest.max()) < _MAX_VALUE:  # also where it is not a number
                return None
            scales[plane] = largest / np.float32(127)
            scaled = values * _inverse(scales[plane])
            np.copyto(numbers[plane], np.rint(scaled, out=scaled), casting="unsafe")
        return encoded.data

    def decode(self, encoded: Buffer, out: memoryview, meta: ChunkMeta) -> None:
        """See the interface."""
        form = planes_of(meta)
        if form is None or meta.dtype not in FLOAT_CODES:
            raise CodecError(f"no int8 payload of {meta.fmt} {meta.dtype}")
        num_planes, _, num_channels = form
        source = np.frombuffer(encoded, np.uint8)
        scale_bytes = 4 * num_planes * num_channels
        if len(source) != HEADER_BYTES + scale_bytes + math.prod(form):
            raise CodecError(f"{len(source)} bytes are no int8 payload for {form}")
        if int(source[0]) != FLOAT_CODES[meta.dtype] or source[1:HEADER_BYTES].any():
            raise CodecError(f"no int8 payload of {meta.dtype}")
        scales = source[HEADER_BYTES : HEADER_BYTES + scale_bytes].view("<f4")
        scales = scales.reshape(num_planes, num_channels)
        numbers = source[HEADER_BYTES + scale_bytes :].view(np.int8).reshape(form)
        target = bits_of(np.frombuffer(out, np.uint8), meta.dtype).reshape(form)
        with np.errstate(all="ignore"):  # a hostile payload may well overflow
            for plane in range(num_planes):
                values = numbers[plane] * scales[plane]
                from_float32(values, meta.dtype, target[plane])


def _inverse(scales: Floats) -> Floats:
    """1 / scale, and 0 for a channel of zeros or of values too small to be told from it."""
    inverse = np.zeros_like(scales)
    np.divide(np.float32(1), scales, out=inverse, where=scales > np.float32(1e-37))
    return inverse
