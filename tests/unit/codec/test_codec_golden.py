"""Golden vectors of the codecs: what was written once is decoded for ever (docs/formats.md)."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvkeep.codec.frame import ChunkMeta
from kvkeep.codec.names import codec_of, decode_chunk
from kvkeep.layout import MemoryFormat

#: One layer, K and V of three tokens with four channels, in the order of memory.
KV = ChunkMeta(MemoryFormat.KV_2LTD, "float32", (2, 1, 3, 4))
VALUES = np.array(
    [
        [1, -2, 0.5, 300, 0, 2.5, -0.25, 150, 3, -1.5, 0.125, -75],
        [0.1, 0.2, 0.3, 0.4, -0.5, 0.6, 0.7, -0.8, 0.9, 1, -1.1, 0],
    ],
    np.float32,
)
FP8 = "02050000000000007f38c030790042a87144bc20e91d252a2db03233b53638b900"
FP8_VALUES = [
    [1, -2, 0.5, 288, 0, 2.5, -0.25, 144, 3, -1.5, 0.125, -72],
    [0.1015625, 0.203125, 0.3125, 0.40625, -0.5, 0.625, 0.6875, -0.8125, 0.875, 1, -1.125, 0],
]
INT8 = (
    "02000000000000000683c13c8542a13c0402813b5d2e1740d436e83b0402013c9ee80d3ca069ce3b"
    "2a9a7f7f007fc03f7fb420e00e192340b94c51817f7f8100"
)
INT8_NUMBERS = (42, -102, 127, 127, 0, 127, -64, 63, 127, -76, 32, -32)
#: The high bytes of 600 bfloat16 numbers, the multiples of 1/7, as one Zstandard frame.
ZSTD_PLANE = "28b52ffd605801a5000040003e3e3e3f40414204100074aa90a80359f106"


def values_of(code: int, payload: bytes) -> np.ndarray:
    out = bytearray(KV.size_bytes)
    decode_chunk(code, payload, memoryview(out), KV)
    return np.frombuffer(out, np.float32)


def test_fp8():
    payload = bytes.fromhex(FP8)
    source = VALUES.tobytes()
    assert bytes(codec_of("fp8").encode(source, KV)) == payload
    assert values_of(2, payload).reshape(2, 12).tolist() == FP8_VALUES


def test_int8():
    payload = bytes.fromhex(INT8)
    source = VALUES.tobytes()
    assert bytes(codec_of("int8").encode(source, KV)) == payload
    scales = np.frombuffer(payload[8:24], "<f4")
    expected = (np.array(INT8_NUMBERS).reshape(3, 4) * scales).ravel()
    assert values_of(3, payload)[:12].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_zstd():
    """The low bytes as they are, the high ones as a frame that some version of the library made."""
    numbers = (np.arange(600, dtype=np.float32) / 7).view(np.uint32) >> 16
    low = (numbers & 0xFF).astype(np.uint8).tobytes()
    frame = bytes.fromhex(ZSTD_PLANE)
    payload = b"\x02\0\0\0" + struct.pack("<I", 1 << 20)
    payload += struct.pack("<I", 600 | 1 << 31) + low + struct.pack("<I", len(frame)) + frame
    meta, out = ChunkMeta(MemoryFormat.BINARY, "bfloat16", (600,)), bytearray(1200)
    decode_chunk(1, payload, memoryview(out), meta)
    assert out == numbers.astype(np.uint16).tobytes()
