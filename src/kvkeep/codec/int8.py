"""Int8Codec: 8-bit integers with a scale per channel. Lossy.

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
"""

from __future__ import annotations

import math

import numpy as np

from kvkeep.codec.base import Codec
from kvkeep.codec.floats import FLOAT_CODES, Floats, bits_of, from_float32, to_float32
from kvkeep.codec.frame import CODEC_INT8, Buffer, ChunkMeta
from kvkeep.errors import CodecError
from kvkeep.layout import KVLayout, MemoryFormat

HEADER_BYTES = 8
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
