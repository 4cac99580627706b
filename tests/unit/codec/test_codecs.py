"""zstd, fp8 and int8: what comes back, how far it may be off, and payloads from outside."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.codec.frame import CODEC_RAW, ChunkMeta
from kvkeep.codec.lossless import BLOCK_BYTES, ZstdCodec
from kvkeep.codec.lossy import Fp8Codec, Int8Codec
from kvkeep.codec.names import choose_codec, codec_by_code, codec_of, decode_chunk, encode_chunk
from kvkeep.errors import CodecError, ConfigError
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat

FLOATS = ("bfloat16", "float16", "float32")
TORCH = {name: getattr(torch, name) for name in FLOATS}


def meta_of(dtype: str, *shape: int) -> ChunkMeta:
    return ChunkMeta(MemoryFormat.KV_2LTD, dtype, shape or (2, 3, 40, 24))


def kv(dtype: str, meta: ChunkMeta, seed: int = 0) -> torch.Tensor:
    """Numbers as in KV: channels of different sizes, some of them large; as it is in memory."""
    first, layers, tokens, hidden = meta.shape
    chance = torch.Generator().manual_seed(seed)
    sizes = torch.exp(2 * torch.randn(layers, first, 1, hidden, generator=chance))
    return (sizes * torch.randn(layers, first, tokens, hidden, generator=chance)).to(TORCH[dtype])


def memory_of(values: torch.Tensor) -> memoryview:
    return values.contiguous().view(torch.uint8).numpy().reshape(-1).data


def round_trip(codec, values: torch.Tensor, meta: ChunkMeta) -> torch.Tensor:
    encoded = codec.encode(memory_of(values), meta)
    assert encoded is not None
    out = torch.empty_like(values)
    codec_by_code(codec.code).decode(encoded, memory_of(out), meta)
    return out


def mutations(good: bytes, chance: random.Random, count: int) -> Iterator[bytes]:
    """Damaged forms of a payload: cut, longer, with other bits, with noise inside."""
    for number in range(count):
        kind = number % 5
        if kind == 0:
            yield good[: chance.randrange(len(good))]
        elif kind == 1:
            yield good + chance.randbytes(chance.randrange(1, 64))
        else:
            data = bytearray(good)
            for _ in range(chance.randrange(1, 6)):
                start = chance.randrange(16 if kind == 2 else len(data))
                data[start : start + 4] = chance.randbytes(len(data[start : start + 4]))
            yield bytes(data)


def layout_of(dtype: str, fmt: MemoryFormat = MemoryFormat.KV_2LTD) -> KVLayout:
    return KVLayout(fmt, dtype, 1, (GroupLayout("full", 3, 16),), 1, 8, "test")


# --- what comes back ---


@pytest.mark.parametrize("size", [1, 7, 4096, 40_001, 3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 10])
@pytest.mark.parametrize("element", [None, *FLOATS, "float64"])
def test_zstd_gives_the_same_bytes_back(size, element):
    chance = np.random.default_rng(size)
    data = (chance.integers(0, 256, size) * (chance.random(size) < 0.3)).astype(np.uint8)
    meta = ChunkMeta(MemoryFormat.OPAQUE_PAGES, "uint8", (1, 1, size))
    encoded, out = ZstdCodec(element).encode(data.data, meta), bytearray(size)
    ZstdCodec().decode(encoded, memoryview(out), meta)
    assert out == data.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_zstd_knows_the_elements_of_kv_and_of_opaque_pages(dtype):
    meta = meta_of(dtype, 2, 8, 256, 64)
    values = memory_of(kv(dtype, meta))
    opaque = ChunkMeta(MemoryFormat.OPAQUE_PAGES, "uint8", (8, 1, len(values) // 8))
    sizes = [
        len(ZstdCodec(dtype).encode(values, opaque)),
        len(ZstdCodec().encode(values, meta)),
        len(ZstdCodec().encode(values, opaque)),
    ]
    assert sizes[0] == sizes[1] < len(values)
    assert sizes[1] < sizes[2]  # taking the elements apart is what saves


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_keeps_four_significant_bits(dtype):
    """Of whatever is not too small beside the largest in its block; else an absolute error."""
    meta = meta_of(dtype)
    values = kv(dtype, meta).float()
    found = round_trip(Fp8Codec(), kv(dtype, meta), meta).float()
    blocks = values.reshape(-1, 32).abs().amax(1, keepdim=True).expand(-1, 32).reshape(values.shape)
    assert bool(((found - values).abs() <= values.abs() / 16 + blocks / 2**17).all())


def test_fp8_rounds_as_the_standard_type_does():
    """Beside torch's own conversion, block by block, with the power of two that the format says."""
    meta = meta_of("float32")
    values = kv("float32", meta, seed=3)
    blocks = values.reshape(-1, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(1, keepdim=True).double() / 448))
    scale = torch.exp2(exponent).float()
    expected = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(round_trip(Fp8Codec(), values, meta), expected.reshape(values.shape))


@pytest.mark.parametrize("dtype", FLOATS)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 100), size=st.integers(-300, 300))
@settings(max_examples=60, deadline=None)
def test_fp8_of_any_finite_numbers_is_finite_and_as_near(dtype, seed, count, size):
    """Zeros, subnormal numbers, the largest ones, and blocks that are not full."""
    meta = ChunkMeta(MemoryFormat.BINARY, dtype, (count,))
    chance = np.random.default_rng(seed)
    numbers = chance.standard_normal(count) * 10.0 ** (size / 8) * (chance.random(count) < 0.9)
    values = torch.from_numpy(numbers).to(TORCH[dtype])
    encoded = Fp8Codec().encode(memory_of(values), meta)
    largest = values.double().abs().amax()
    if encoded is None:
        assert not bool(values.isfinite().all()) or largest >= 2.0**127
        return
    out = torch.empty_like(values)
    Fp8Codec().decode(encoded, memory_of(out), meta)
    assert bool(out.isfinite().all())
    error = (out.double() - values.double()).abs()
    tiny = {"float16": 2.0**-24}.get(dtype, 2.0**-126)
    assert bool((error <= values.double().abs() / 16 + largest / 2**17 + tiny).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_is_off_by_half_a_step_of_its_channel(dtype):
    meta = meta_of(dtype)
    values = kv(dtype, meta)
    found = round_trip(Int8Codec(), values, meta).float()
    steps = values.float().abs().amax(2, keepdim=True) / 127
    rounding = values.float().abs() * {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}[dtype]
    assert bool(((found - values.float()).abs() <= steps * 0.5001 + rounding + 1e-6).all())


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        (MemoryFormat.KV_MLA_FMT, (1, 3, 40, 24)),
        (MemoryFormat.KV_T2D, (40, 2, 24)),
        (MemoryFormat.KV_2TD, (2, 40, 24)),
    ],
)
def test_int8_knows_the_channels_of_every_dense_form(fmt, shape):
    """A channel that is a thousand times larger than the others costs them nothing."""
    meta = ChunkMeta(fmt, "float32", shape)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values[..., 5] *= 1000
    encoded = Int8Codec().encode(memory_of(values), meta)
    out = torch.empty_like(values)
    Int8Codec().decode(encoded, memory_of(out), meta)
    others = [channel for channel in range(24) if channel != 5]
    assert float((out - values)[..., others].abs().max()) < 0.02


@pytest.mark.parametrize("codec", [Fp8Codec(), Int8Codec()])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 3e38])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_chunk_with_values_that_cannot_be_kept_stays_raw(codec, bad, dtype):
    meta = meta_of(dtype)
    values = kv(dtype, meta)
    values[1, 1, 7, 9] = bad
    assert encode_chunk(codec, memory_of(values), meta).code == CODEC_RAW


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("codec", [Fp8Codec(), Int8Codec()])
def test_lossy_codecs_leave_other_elements_alone(codec, dtype):
    meta = meta_of(dtype)
    assert codec.encode(bytes(meta.size_bytes), meta) is None
    assert codec.why_not(layout_of(dtype)) is not None


@pytest.mark.parametrize("name", ["fp8", "int8", "zstd"])
def test_encoding_changes_neither_the_chunk_nor_itself(name):
    """The same bytes give the same payload, and they are only read."""
    meta = meta_of("bfloat16")
    values = bytes(memory_of(kv("bfloat16", meta)))
    first = bytes(codec_of(name).encode(values, meta))
    assert bytes(codec_of(name).encode(values, meta)) == first


# --- which chunks ---


def test_opaque_pages_can_be_fp8_if_their_elements_are_known_and_never_int8():
    pages = layout_of("uint8", MemoryFormat.OPAQUE_PAGES)
    assert choose_codec("fp8", pages, element="bfloat16", setting="disk.codec").name == "fp8"
    with pytest.raises(ConfigError, match=r"disk\.codec: int8 .* Use fp8 or zstd or raw"):
        choose_codec("int8", pages, element="bfloat16", setting="disk.codec")
    with pytest.raises(ConfigError, match=r"its elements are unknown.* Use zstd or raw"):
        choose_codec("fp8", pages, element=None, setting="disk.codec")
    with pytest.raises(ConfigError, match="its elements are float8_e4m3fn"):
        choose_codec("fp8", pages, element="float8_e4m3fn", setting="disk.codec")


def test_opaque_pages_are_decoded_without_knowing_their_elements():
    meta = ChunkMeta(MemoryFormat.OPAQUE_PAGES, "uint8", (3, 5, 512))
    values = torch.randn(3 * 5 * 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    encoded = Fp8Codec("bfloat16").encode(memory_of(values), meta)
    out = torch.empty_like(values)
    decode_chunk(Fp8Codec.code, encoded, memory_of(out), meta)
    assert bool(((out - values).abs() <= values.abs() / 16 + 1e-4).all())


# --- payloads from outside ---


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["fp8", "int8", "zstd", "raw"])
def test_damaged_payloads_never_write_outside(name, dtype):
    """Cut, longer, with changed bits, or noise: an error or some numbers, inside of the chunk."""
    meta = meta_of(dtype)
    good = bytes(codec_of(name).encode(memory_of(kv(dtype, meta)), meta))
    room = bytearray(b"\xa5" * (meta.size_bytes + 128))
    out = memoryview(room)[64 : 64 + meta.size_bytes]
    refused = 0
    for payload in mutations(good, random.Random(5), count=300):
        try:
            decode_chunk(codec_of(name).code, payload, out, meta)
        except CodecError:
            refused += 1
        assert room[:64] == room[-64:] == b"\xa5" * 64
    assert refused >= 60  # all that are shorter or longer


@pytest.mark.parametrize("name", ["fp8", "int8", "zstd", "raw"])
@given(payload=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused(name, payload):
    meta = meta_of("float32")
    with pytest.raises(CodecError):
        decode_chunk(codec_of(name).code, payload, memoryview(bytearray(meta.size_bytes)), meta)


@pytest.mark.parametrize("claimed", [1 << 40, 6000, 0])
def test_zstd_believes_no_claim_of_a_size(claimed):
    """What a frame says of its size is what the library would allocate."""
    meta = ChunkMeta(MemoryFormat.BINARY, "uint8", (5000,))
    data = zstandard.ZstdCompressor().compress(bytes(5000))
    # A frame's head: magic (4), descriptor with an 8-byte content size and one segment, the size.
    frame = data[:4] + b"\xe0" + claimed.to_bytes(8, "little") + data[7:]
    payload = struct.pack("<B3xI", 1, BLOCK_BYTES) + struct.pack("<I", len(frame)) + frame
    with pytest.raises(CodecError):
        ZstdCodec().decode(payload, memoryview(bytearray(5000)), meta)


def test_payloads_of_another_element_type_are_refused():
    meta = meta_of("float16")
    values = memory_of(kv("float16", meta))
    for codec in (Fp8Codec(), Int8Codec()):
        encoded = bytes(codec.encode(values, meta))
        other = ChunkMeta(meta.fmt, "bfloat16", meta.shape)
        with pytest.raises(CodecError):
            codec.decode(encoded, memoryview(bytearray(meta.size_bytes)), other)
