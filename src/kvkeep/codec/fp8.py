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
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvkeep.codec.base import Codec
from kvkeep.codec.floats import (
    FLOAT_CODES,
    FLOAT_NAMES,
    PIECE_ELEMENTS,
    Bits,
    bits_of,
    from_float32,
    to_float32,
)
from kvkeep.codec.frame import CODEC_FP8, Buffer, ChunkMeta
from kvkeep.errors import CodecError
from kvkeep.layout import DTYPE_SIZES, KVLayout

Bytes = npt.NDArray[np.uint8]

BLOCK_LOG, BLOCK = 5, 32
HEADER_BYTES = 8
#: The smallest shared exponent: with it, elements that are no normal numbers are rounded as floats.
_MIN_EXPONENT = 8
#: Blocks with larger elements are not encoded: what is decoded might not be finite.
_MAX_FLOAT_EXPONENT = 253

_CODES = np.arange(256, dtype=np.uint16)
#: Value of each e4m3 code, as float32.
VALUES = (
    (((_CODES & 0x7F) << 7) | ((_CODES & 0x80) << 8)).astype(np.uint16).view(np.float16)
).astype(np.float32) * np.float32(256.0)


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
        for start in range(0, len(bits), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            blocks = slice(start // BLOCK, (start + PIECE_ELEMENTS) // BLOCK)
            if not _encode_piece(bits[piece], dtype, exponents[blocks], codes[piece]):
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
        for start in range(0, num, PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            blocks = slice(start // BLOCK, (start + PIECE_ELEMENTS) // BLOCK)
            _decode_piece(exponents[blocks], codes[piece], dtype, bits[piece])


def _encode_piece(bits: Bits, dtype: str, exponents: Bytes, codes: Bytes) -> bool:
    """Encode whole blocks, the last of which may be short; False if a value is too large for it."""
    num = len(bits)
    if dtype == "float16":
        bits = to_float32(bits, dtype).view(np.uint32)
        dtype = "float32"
    if num % BLOCK:
        bits = np.concatenate([bits, np.zeros(-num % BLOCK, bits.dtype)])
    mantissa, signed = (23, np.int32) if dtype == "float32" else (7, np.int16)
    unit = bits.dtype.type  # numpy keeps to the width of the elements
    magnitudes = bits & unit(~(1 << (8 * bits.itemsize - 1)) & ((1 << (8 * bits.itemsize)) - 1))
    largest = np.ascontiguousarray(magnitudes.reshape(-1, BLOCK).T).max(axis=0).astype(np.int64)
    if int(largest.max(initial=0)) >> mantissa > _MAX_FLOAT_EXPONENT:
        return False
    # The power of two 2^(E - 127) with which the largest element is at most 448 = 1.75 * 2^8.
    shared = ((largest + (1 << (mantissa - 2)) - 1) >> mantissa) - 8
    np.clip(shared, _MIN_EXPONENT, None, out=shared)
    exponents[:] = shared
    shift = ((7 - shared) << mantissa).astype(signed)
    scaled = magnitudes.view(signed).reshape(-1, BLOCK) + shift[:, None]
    scaled = scaled.reshape(-1)  # e4m3 numbers with too many bits of mantissa, where normal
    drop = mantissa - 3
    small = np.flatnonzero(scaled < signed(1 << mantissa))
    scaled += ((scaled >> signed(drop)) & signed(1)) + signed((1 << (drop - 1)) - 1)
    scaled >>= signed(drop)
    if len(small):
        floats = np.abs(to_float32(bits[small], dtype))
        steps = np.ldexp(floats, 136 - shared[small // BLOCK])  # in units of the smallest, 2^-9
        scaled[small] = np.rint(steps).astype(signed)
    signs = (bits >> unit(8 * bits.itemsize - 8)) & unit(0x80)
    np.copyto(codes, (scaled.view(bits.dtype) | signs)[:num], casting="unsafe")
    return True


def _decode_piece(exponents: Bytes, codes: Bytes, dtype: str, out: Bits) -> None:
    """Decode whole blocks, the last of which may be short."""
    if int((codes & np.uint8(0x7F)).max(initial=0)) == 0x7F:
        raise CodecError("an fp8 payload has a number that is none")
    num = len(codes)
    values = np.empty(len(exponents) * BLOCK, np.float32)
    VALUES.take(codes, out=values[:num], mode="clip")
    scales = (exponents.astype(np.uint32) << np.uint32(23)).view(np.float32)
    with np.errstate(all="ignore"):  # a hostile payload may well overflow
        blocks = values.reshape(-1, BLOCK)
        blocks *= scales[:, None]
        from_float32(values[:num], dtype, out)
