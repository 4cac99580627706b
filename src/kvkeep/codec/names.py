"""Codecs by name and by code, and the two functions that tiers call.

Callable from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvkeep.codec.base import Codec
from kvkeep.codec.frame import CODEC_RAW, Buffer, ChunkMeta
from kvkeep.codec.lossless import RawCodec, ZstdCodec
from kvkeep.codec.lossy import Fp8Codec, Int8Codec
from kvkeep.errors import CodecError, ConfigError
from kvkeep.layout import KVLayout

#: What makes each codec, given the element type of opaque pages.
_MAKERS: dict[str, Callable[[str | None], Codec]] = {
    RawCodec.name: lambda element: RawCodec(),
    ZstdCodec.name: ZstdCodec,
    Fp8Codec.name: Fp8Codec,
    Int8Codec.name: lambda element: Int8Codec(),
}
#: Payloads say what they need to be decoded, so one codec of each kind decodes all.
_BY_CODE = {codec.code: codec for codec in (make(None) for make in _MAKERS.values())}

#: Names in the settings.
CODEC_NAMES = tuple(_MAKERS)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The payload of a frame.

    Attributes:
        code: of the codec that it was encoded with, for the frame's header.
        payload: the bytes.
    """

    code: int
    payload: Buffer


def codec_of(name: str, *, element: str | None = None) -> Codec:
    """The codec of a name in the settings.

    Args:
        name: see :data:`CODEC_NAMES`.
        element: element type of opaque pages, whose chunks do not say it; None if it is unknown.

    Raises:
        ConfigError: there is no codec of this name.
    """
    make = _MAKERS.get(name.lower())
    if make is None:
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(CODEC_NAMES)}")
    return make(element)


def choose_codec(name: str, layout: KVLayout, *, element: str | None, setting: str) -> Codec:
    """The codec that a tier's setting names, for chunks of ``layout``.

    Args:
        name: value of the setting.
        layout: the engine's.
        element: as for :func:`codec_of`.
        setting: its name, for the error.

    Raises:
        ConfigError: there is no such codec, or it cannot encode such chunks; says what can.
    """
    codec = codec_of(name, element=element)
    reason = codec.why_not(layout)
    if reason is None:
        return codec
    others = (other for other in CODEC_NAMES if codec_of(other, element=element).lossy)
    fits = [other for other in others if codec_of(other, element=element).why_not(layout) is None]
    raise ConfigError(
        f"{setting}: {codec.name} cannot encode this engine's KV: {reason}. "
        f"Use {' or '.join([*fits, 'zstd', 'raw'])}"
    )


def codec_by_code(code: int) -> Codec:
    """The codec of a code in a frame's header; for decoding.

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
