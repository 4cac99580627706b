"""Codecs by name and code: what cannot be known is an error, what saves nothing stays raw."""

from __future__ import annotations

import pytest

from kvkeep.codec.base import Codec
from kvkeep.codec.frame import CODEC_RAW, ChunkMeta
from kvkeep.codec.names import (
    CODEC_NAMES,
    Encoded,
    codec_by_code,
    codec_of,
    decode_chunk,
    encode_chunk,
)
from kvkeep.errors import CodecError, ConfigError
from kvkeep.layout import MemoryFormat

META = ChunkMeta(MemoryFormat.BINARY, "uint8", (64,))
PAYLOAD = bytes(range(64))


class Growing(Codec):
    """Claims to encode, and only gets longer."""

    name = "growing"
    code = 1

    def encode(self, payload, meta):
        return bytes(payload) + b"!"

    def decode(self, encoded, out, meta):
        raise AssertionError("nothing is encoded with it")


class Declining(Growing):
    """Declines every chunk."""

    def encode(self, payload, meta):
        return None


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_names_and_codes_lead_to_the_same_codec(name):
    assert type(codec_of(name)) is type(codec_by_code(codec_of(name).code))
    assert codec_of(name.upper()).name == name


def test_an_unknown_name_or_code_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match="'gzip'; known: raw"):
        codec_of("gzip")
    with pytest.raises(CodecError, match="no codec 200"):
        codec_by_code(200)


def test_raw_is_no_copy():
    encoded = encode_chunk(codec_of("raw"), PAYLOAD, META)
    assert encoded.code == CODEC_RAW
    assert encoded.payload is PAYLOAD


@pytest.mark.parametrize("codec", [Growing(), Declining()])
def test_what_saves_nothing_stays_raw(codec):
    assert encode_chunk(codec, PAYLOAD, META) == Encoded(CODEC_RAW, PAYLOAD)


def test_raw_fills_the_chunk_exactly_or_not_at_all():
    out = bytearray(64)
    decode_chunk(CODEC_RAW, PAYLOAD, memoryview(out), META)
    assert out == PAYLOAD
    with pytest.raises(CodecError):
        decode_chunk(CODEC_RAW, PAYLOAD[:-1], memoryview(out), META)
    with pytest.raises(CodecError):
        decode_chunk(CODEC_RAW, PAYLOAD[:-1], memoryview(out)[:-1], META)
