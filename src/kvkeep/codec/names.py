"""Codecs by name and by code, and the two functions that tiers call.

Callable from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.codec.base import Codec
from kvkeep.codec.frame import CODEC_RAW, Buffer, ChunkMeta
from kvkeep.codec.raw import RawCodec
from kvkeep.errors import CodecError, ConfigError

_CODECS: tuple[Codec, ...] = (RawCodec(),)
_BY_NAME = {codec.name: codec for codec in _CODECS}
_BY_CODE = {codec.code: codec for codec in _CODECS}

#: Names in the settings.
CODEC_NAMES = tuple(_BY_NAME)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payload of a frame.

    Attributes:
        code: of the codec that it was encoded with, for the frame's header.
        payload: the bytes.
    """

    code: int
    payload: Buffer


def codec_of(name: str) -> Codec:
    """The codec of a name in the settings.

    Raises:
        ConfigError: there is none.
    """
    codec = _BY_NAME.get(name.lower())
    if codec is None:
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(CODEC_NAMES)}")
    return codec


def codec_by_code(code: int) -> Codec:
    """The codec of a code in a frame's header.

    Raises:
        CodecError: there is none.
    """
    codec = _BY_CODE.get(code)
    if codec is None:
        raise CodecError(f"there is no codec {code}")
    return codec


def encode_chunk(codec: Codec, payload: Buffer, meta: ChunkMeta) -> Encoded:
    """Encode a chunk; raw, without a copy, where the codec declines or saves nothing."""
    encoded = codec.encode(payload, meta)
    if encoded is None or memoryview(encoded).nbytes >= memoryview(payload).nbytes:
        return Encoded(CODEC_RAW, payload)
    return Encoded(codec.code, encoded)


def decode_chunk(code: int, encoded: Buffer, out: memoryview, meta: ChunkMeta) -> None:
    """Fill ``out`` with a chunk whose frame was verified.

    Args:
        code: the codec in the frame's header.
        encoded: the payload.
        out: writable bytes, ``meta.size_bytes`` long; they mean nothing after an error.
        meta: what the header says, checked by the caller against what it expects.

    Raises:
        CodecError: the payload is none of this codec's, or does not fill the chunk exactly.
    """
    if memoryview(out).nbytes != meta.size_bytes:
        raise CodecError(f"{memoryview(out).nbytes} bytes for a chunk of {meta.size_bytes}")
    codec_by_code(code).decode(encoded, out, meta)
