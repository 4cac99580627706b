"""Codecs of the disk tier under a whole engine: what comes back, who finds it, what it costs."""

from __future__ import annotations

import pytest
import torch

from kvkeep.codec.frame import HEADER_BYTES, FrameHeader, checksum, parse_header
from kvkeep.codec.names import CODEC_NAMES, codec_of
from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.errors import ConfigError, IdentityError
from kvkeep.gpu.dense import DenseGPUConnector
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.testing.chunks import wait_until
from support.disk import chunk_files, file_bytes
from support.paged_engine import PagedEngine

DISK = "LocalDiskBackend"
LAYERS, HEADS, SIZE, TOKENS = 4, 2, 64, 128
CHUNK = 64
PROMPT = list(range(100, 100 + TOKENS))
LAYOUT = KVLayout(
    fmt=MemoryFormat.KV_2LTD,
    dtype="float32",
    page_size=1,
    groups=(GroupLayout("full", LAYERS, 2 * HEADS * SIZE * 4),),
    num_kv_heads=HEADS,
    head_size=SIZE,
    engine="test",
)
CHUNK_BYTES = LAYOUT.chunk_bytes(CHUNK)


def kv_caches(seed: int | None = None):
    shape = (LAYERS, 2, TOKENS, HEADS, SIZE)
    values = torch.zeros(shape)
    if seed is not None:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return [(layer[0], layer[1]) for layer in values]


def build(path, codec, **extra):
    given = {"chunk_size": CHUNK, "cpu.size": "4MiB", "disk.path": str(path), "disk.codec": codec}
    settings = load_settings(env={}, extra={**given, **extra})
    identity = CacheIdentity("m", "1", LAYOUT, chunk_size=CHUNK)
    return CacheManager.create(settings, identity, DenseGPUConnector(LAYOUT))


def store(manager, caches):
    stored = manager.engine.store(PROMPT, kvcaches=caches, slot_mapping=None)
    assert stored.num_tokens == TOKENS
    assert manager.storage.storage_backends[DISK].flush(20)


def load(manager):
    """What is loaded, and how many tokens of it."""
    caches = kv_caches()
    mask = manager.engine.retrieve(PROMPT, kvcaches=caches, slot_mapping=None)
    return caches, int(mask.sum())


def worst_error(found, expected):
    return max(
        float((a - b).abs().max())
        for x, y in zip(found, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_what_a_restart_finds(tmp_path, name):
    """The same KV from raw and zstd, nearly the same from fp8 and int8, exact KV from memory."""
    caches = kv_caches(seed=1)
    with build(tmp_path, name) as manager:
        store(manager, caches)
        found, count = load(manager)
        assert (worst_error(found, caches), count) == (0.0, TOKENS)
        codes = {parse_header(path.read_bytes()).codec for path in chunk_files(tmp_path)}
        assert codes == {codec_of(name).code}
    with build(tmp_path, name) as manager:
        for _ in range(2):  # from the disk, and then from memory
            found, count = load(manager)
            assert count == TOKENS
            error = worst_error(found, caches)
            assert (error > 0) == codec_of(name).lossy
            assert error < 0.3
        assert manager.engine.check().num_objects == TOKENS // CHUNK


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("other", CODEC_NAMES)
def test_nobody_without_a_lossy_codec_finds_its_chunks(tmp_path, name, other):
    """It is part of the identity: other keys, in every tier, in the same directory."""
    caches = kv_caches(seed=1)
    with build(tmp_path, name) as manager:
        store(manager, caches)
    with build(tmp_path, other) as manager:
        assert load(manager)[1] == (TOKENS if other == name else 0)


@pytest.mark.parametrize(("writer", "reader"), [("raw", "zstd"), ("zstd", "raw")])
def test_lossless_codecs_share_a_directory(tmp_path, writer, reader):
    caches = kv_caches(seed=1)
    with build(tmp_path, writer) as manager:
        store(manager, caches)
    with build(tmp_path, reader) as manager:
        found, count = load(manager)
        assert (worst_error(found, caches), count) == (0.0, TOKENS)
        store(manager, caches)
        assert len(chunk_files(tmp_path)) == TOKENS // CHUNK


@pytest.mark.parametrize(("name", "most"), [("zstd", 0.93), ("fp8", 0.27), ("int8", 0.27)])
def test_files_and_the_budget_count_encoded_bytes(tmp_path, name, most):
    with build(tmp_path, name) as manager:
        store(manager, kv_caches(seed=1))
        sizes = [path.stat().st_size for path in chunk_files(tmp_path)]
        assert all(size <= HEADER_BYTES + most * CHUNK_BYTES for size in sizes)
        disk = manager.storage.storage_backends[DISK]
        assert disk.used_bytes() == file_bytes(tmp_path / "kvkeep-disk-v1" / "chunks") + 4096


def test_a_budget_holds_more_chunks_of_a_codec(tmp_path):
    """Four times as many as would fit raw, and the budget is kept."""
    budget = 4096 + 2 * (CHUNK_BYTES + 4096)
    kept = {}
    for name in ("raw", "fp8"):
        with build(tmp_path / name, name, **{"disk.size": f"{budget}B"}) as manager:
            for turn in range(5):
                tokens = [token + 1000 * turn for token in PROMPT]
                manager.engine.store(tokens, kvcaches=kv_caches(seed=turn), slot_mapping=None)
                assert manager.storage.storage_backends[DISK].flush(20)
            assert file_bytes(tmp_path / name) <= budget
            kept[name] = len(chunk_files(tmp_path / name))
    assert kept == {"raw": 2, "fp8": 7}


def damage(path, change):
    """Rewrite a chunk's payload under a right checksum."""
    data = path.read_bytes()
    header = parse_header(data)
    payload = change(data[HEADER_BYTES:])
    new = FrameHeader(
        header.key,
        header.identity,
        header.meta,
        len(payload),
        checksum(payload),
        header.codec,
    )
    path.write_bytes(new.pack() + payload)


@pytest.mark.parametrize("name", ["zstd", "fp8", "int8"])
@pytest.mark.parametrize(
    "change",
    [lambda data: data[:-3], lambda data: data + b"123", lambda data: b"\xee" * len(data)],
    ids=["shorter", "longer", "noise"],
)
def test_a_payload_that_its_codec_cannot_have_made_is_a_miss(tmp_path, name, change):
    """Fault 5: also if its checksum is right. It is removed and counted."""
    with build(tmp_path, name) as manager:
        store(manager, kv_caches(seed=1))
    for path in chunk_files(tmp_path):
        damage(path, change)
    with build(tmp_path, name) as manager:
        assert load(manager)[1] == 0
        counted = manager.metrics.snapshot()
        key = f'kvkeep_failures_total{{tier="{DISK}",operation="get",cause="codec"}}'
        assert counted[key] >= 1
        wait_until(lambda: len(chunk_files(tmp_path)) < TOKENS // CHUNK)
        assert manager.engine.check().num_objects == 0


def test_pages_of_an_engine(tmp_path):
    """int8 needs channels and is refused with what to use; zstd keeps pages as they are."""
    model = PagedEngine(num_pages=8)
    identity = CacheIdentity("m", "1", model.layout, chunk_size=8)

    def create(codec):
        extra = {
            "chunk_size": 8,
            "cpu.size": "64KiB",
            "disk.path": str(tmp_path),
            "disk.codec": codec,
        }
        connector = PagedGPUConnector(model.layout)
        connector.register_kv_caches(model.caches)
        return CacheManager.create(load_settings(env={}, extra=extra), identity, connector)

    with pytest.raises(ConfigError, match=r"disk\.codec: int8 cannot .* Use .*zstd or raw"):
        create("int8")
    tokens, pages = list(range(32)), range(8)
    model.prefill(tokens, pages)
    slots = model.slots(pages, 32)
    with create("zstd") as manager:
        manager.engine.store(tokens, kvcaches=model.caches, slot_mapping=slots)
        assert manager.storage.storage_backends[DISK].flush(20)
    with create("zstd") as manager:
        model.wipe(pages)
        manager.engine.retrieve(tokens, kvcaches=model.caches, slot_mapping=slots)
        assert all(model.right_pages(tokens, pages))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pages_of_floats_survive_a_restart_as_fp8(tmp_path, dtype):
    """Their order is unknown, their elements are those of the registered caches."""
    page_bytes = 16 * 64 * dtype.itemsize
    layout = KVLayout(
        MemoryFormat.OPAQUE_PAGES,
        "uint8",
        16,
        (GroupLayout("full", 3, page_bytes),),
        0,
        0,
        engine="test",
    )
    values = torch.randn(3, 8, 16 * 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    caches = list(values.clone())
    tokens, slots = list(range(128)), torch.arange(128)
    extra = {"chunk_size": 32, "cpu.size": "4MiB", "disk.path": str(tmp_path), "disk.codec": "fp8"}

    def create():
        connector = PagedGPUConnector(layout)
        connector.register_kv_caches(caches)
        identity = CacheIdentity("m", "1", layout, chunk_size=32)
        return CacheManager.create(load_settings(env={}, extra=extra), identity, connector)

    with create() as manager:
        manager.engine.store(tokens, kvcaches=None, slot_mapping=slots)
        assert manager.storage.storage_backends[DISK].flush(20)
    for cache in caches:
        cache.zero_()
    with create() as manager:
        assert manager.engine.retrieve(tokens, kvcaches=None, slot_mapping=slots).all()
    found = torch.stack(caches).float()
    assert found.abs().max() > 1
    assert bool(((found - values.float()).abs() <= values.float().abs() / 16 + 1e-4).all())
    sizes = [path.stat().st_size for path in chunk_files(tmp_path)]
    assert max(sizes) < 0.53 * 2 / dtype.itemsize * 3 * 2 * page_bytes + HEADER_BYTES


def test_the_name_of_the_tag_is_taken(tmp_path):
    with pytest.raises(IdentityError, match="unique"):
        settings = load_settings(
            env={},
            extra={"chunk_size": CHUNK, "disk.path": str(tmp_path), "disk.codec": "fp8"},
        )
        tags = (("kvkeep.codec.disk", "raw"),)
        identity = CacheIdentity("m", "1", LAYOUT, chunk_size=CHUNK, tags=tags)
        CacheManager.create(settings, identity, DenseGPUConnector(LAYOUT))
