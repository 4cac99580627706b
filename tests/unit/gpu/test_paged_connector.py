from __future__ import annotations

import numpy as np
import pytest
import torch

from kvkeep.errors import LayoutError
from kvkeep.gpu import threads
from kvkeep.gpu.base import KVCaches
from kvkeep.gpu.device import DeviceCopier
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.gpu.pages import segments_of
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from support.paged_engine import PagedEngine

WAYS = [
    pytest.param({}, id="one thread"),
    pytest.param({"copy_threads": 3}, id="three threads"),
    pytest.param({"native": False}, id="numpy"),
    pytest.param({"native": False, "copy_threads": 3}, id="numpy, three threads"),
    pytest.param({"use_torch": True}, id="torch"),
    pytest.param({"use_torch": True, "copy_threads": 2}, id="torch, two threads"),
]
TOKENS = list(range(100, 132))  # 8 pages of 4 tokens
PAGES = [11, 3, 4, 5, 0, 9, 7, 2]
STARTS, ENDS = [0, 8, 16, 24], [8, 16, 24, 32]


@pytest.fixture(params=WAYS)
def connector(request, monkeypatch):
    monkeypatch.setattr(threads, "HEAD_START_BYTES", 0)  # these layers are too small to share
    engine = PagedEngine(num_pages=12)
    made = PagedGPUConnector(engine.layout, **request.param)
    yield engine, made
    made.close()


def out_and_in(engine, connector, chunks, *, layerwise: bool, slots_in=None):
    slots = engine.slots(PAGES, 32)
    slots_in = slots if slots_in is None else slots_in
    engine.prefill(TOKENS, PAGES)
    if layerwise:
        move_out, move_in = connector.layerwise_from_gpu, connector.layerwise_to_gpu
        steps = list(move_out(chunks, STARTS, ENDS, kvcaches=engine.caches, slot_mapping=slots))
        assert len(steps) == 3
        engine.wipe(range(12))
        steps = list(move_in(chunks, STARTS, ENDS, kvcaches=engine.caches, slot_mapping=slots_in))
        assert len(steps) == 3
    else:
        where = {"kvcaches": engine.caches}
        connector.batched_from_gpu(chunks, STARTS, ENDS, slot_mapping=slots, **where)
        engine.wipe(range(12))
        connector.batched_to_gpu(chunks, STARTS, ENDS, slot_mapping=slots_in, **where)


@pytest.mark.parametrize("layerwise", [False, True])
def test_out_and_in_gives_the_same_bytes(connector, make_chunks, layerwise: bool) -> None:
    engine, gpu = connector
    chunks = make_chunks(gpu, [8, 8, 8, 8])
    out_and_in(engine, gpu, chunks, layerwise=layerwise)
    assert engine.right_pages(TOKENS, PAGES) == [True] * 8
    others = sorted(set(range(12)) - set(PAGES))
    assert all(engine.wiped_pages(others))
    kv = engine.kv_of(TOKENS)
    for index, chunk in enumerate(chunks):
        assert (chunk.array.reshape(3, 2, 64) == kv[:, 2 * index : 2 * index + 2]).all()


@pytest.mark.parametrize("layerwise", [False, True])
def test_into_other_pages_than_it_came_from(connector, make_chunks, layerwise: bool) -> None:
    engine, gpu = connector
    target = [1, 2, 3, 8, 9, 10, 11, 0]
    chunks = make_chunks(gpu, [8] * 4)
    out_and_in(engine, gpu, chunks, layerwise=layerwise, slots_in=engine.slots(target, 32))
    assert engine.right_pages(TOKENS, target) == [True] * 8
    assert all(engine.wiped_pages([4, 5, 6, 7]))


@pytest.mark.parametrize("layerwise", [False, True])
def test_skipped_pages_are_not_written(connector, make_chunks, layerwise: bool) -> None:
    engine, gpu = connector
    slots = engine.slots(PAGES, 32)
    skipped = [0, 1, 2, 5]  # a chunk, a first page, a second page
    for page in skipped:
        slots[page * 4 : page * 4 + 4] = -1
    chunks = make_chunks(gpu, [8] * 4)
    out_and_in(engine, gpu, chunks, layerwise=layerwise, slots_in=slots)
    right = engine.right_pages(TOKENS, PAGES)
    assert right == [page not in skipped for page in range(8)]
    assert all(engine.wiped_pages([PAGES[page] for page in skipped]))


def test_offset_and_an_unfull_last_page(connector, make_chunks) -> None:
    engine, gpu = connector
    tokens = TOKENS[:27]
    engine.prefill(tokens, PAGES)
    slots = engine.slots(PAGES, 27)[16:]
    chunks = make_chunks(gpu, [8, 3])
    caches = engine.caches
    gpu.batched_from_gpu(chunks, [16, 24], [24, 27], kvcaches=caches, slot_mapping=slots, offset=16)
    engine.wipe(PAGES)
    gpu.batched_to_gpu(chunks, [16, 24], [24, 27], kvcaches=caches, slot_mapping=slots, offset=16)
    assert engine.right_pages(tokens, PAGES) == [False] * 4 + [True] * 3


def test_wrong_slots_raise_before_anything_is_copied(connector, make_chunks) -> None:
    """Fault 31: what the caller got wrong is a named ValueError, not an assertion."""
    engine, gpu = connector
    chunks = make_chunks(gpu, [8, 8])
    slots = engine.slots(PAGES, 16)
    slots[13] = 3
    arguments = dict(kvcaches=engine.caches, slot_mapping=slots)
    for move in (gpu.batched_from_gpu, gpu.layerwise_from_gpu):
        with pytest.raises(ValueError, match="token 13"):
            move(chunks, [0, 8], [8, 16], **arguments)
    for move in (gpu.batched_to_gpu, gpu.layerwise_to_gpu):
        with pytest.raises(ValueError, match="token 13"):
            move(chunks, [0, 8], [8, 16], **arguments)
    assert all((chunk.array == 0xAB).all() for chunk in chunks)
    assert all(engine.wiped_pages(range(12)))
    with pytest.raises(ValueError, match="slot mapping"):
        gpu.batched_to_gpu(chunks, [0, 8], [8, 16], kvcaches=engine.caches, slot_mapping=None)
    with pytest.raises(ValueError, match="none are registered"):
        gpu.batched_to_gpu(chunks, [0, 8], [8, 16], kvcaches=None, slot_mapping=slots)
    with pytest.raises(ValueError, match="do not fill"):
        gpu.from_gpu(chunks[0], 0, 4, kvcaches=engine.caches, slot_mapping=engine.slots(PAGES, 16))


def test_a_layerwise_load_may_be_dropped(connector, make_chunks) -> None:
    engine, gpu = connector
    chunks = make_chunks(gpu, [8] * 4)
    engine.prefill(TOKENS, PAGES)
    slots = engine.slots(PAGES, 32)
    gpu.batched_from_gpu(chunks, STARTS, ENDS, kvcaches=engine.caches, slot_mapping=slots)
    engine.wipe(range(12))
    load = gpu.layerwise_to_gpu(chunks, STARTS, ENDS, kvcaches=engine.caches, slot_mapping=slots)
    next(load)
    load.close()
    written = [bool((cache[PAGES] == torch.tensor(0xEE)).all()) for cache in engine.caches]
    assert written[0] is False  # layer 0 was complete at the first yield
    assert written[2] is True  # nobody asked for layer 2


def caches_like(kind: str) -> KVCaches:
    """Three layers of 12 pages of 2 heads, 4 tokens, 8 values in four arrangements."""
    if kind == "bfloat16":
        return [torch.zeros(12, 2, 4, 8, dtype=torch.bfloat16) for _ in range(3)]
    if kind == "float8":
        return [torch.zeros(12, 2, 4, 16, dtype=torch.float8_e4m3fn) for _ in range(3)]
    if kind == "token first in memory":
        return [torch.zeros(12, 4, 2, 8, dtype=torch.half).transpose(1, 2) for _ in range(3)]
    if kind == "layers interleaved in one storage":
        storage = torch.zeros(12, 3, 2, 4, 8, dtype=torch.half)
        return [storage[:, layer] for layer in range(3)]
    if kind == "padded pages":
        return [torch.zeros(12, 144, dtype=torch.uint8)[:, :128] for _ in range(3)]
    raise AssertionError(kind)


KINDS = [
    "bfloat16",
    "float8",
    "token first in memory",
    "layers interleaved in one storage",
    "padded pages",
]


def opaque(num_layers: int, page_bytes: int, page_size: int = 4) -> KVLayout:
    group = GroupLayout("full", num_layers, page_bytes)
    return KVLayout(MemoryFormat.OPAQUE_PAGES, "uint8", page_size, (group,), 0, 0, "test")


@pytest.mark.parametrize("options", [{}, {"native": False}, {"use_torch": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_any_dtype_and_physical_order(kind: str, options, make_chunks) -> None:
    caches = caches_like(kind)
    gpu = PagedGPUConnector(opaque(3, 128), **options)
    gpu.register_kv_caches(caches)
    generator = torch.Generator().manual_seed(1)

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.contiguous().reshape(-1).view(torch.uint8) for p in tensor])

    for cache in caches:
        assert not as_bytes(cache).any()  # the self-test has put back what was there
        new = torch.randint(0, 256, (12, 128), dtype=torch.uint8, generator=generator)
        for page, content in zip(cache, new, strict=True):
            page.copy_(content.view(cache.dtype).reshape(page.shape))
    before = [as_bytes(cache) for cache in caches]
    chunks = make_chunks(gpu, [16])
    pages = [10, 0, 5, 6]
    slots = torch.tensor([p * 4 + i for p in pages for i in range(4)])
    gpu.from_gpu(chunks[0], 0, 16, kvcaches=None, slot_mapping=slots)
    for cache in caches:
        for page in pages:
            cache[page].copy_(torch.zeros_like(cache[page]))
    gpu.to_gpu(chunks[0], 0, 16, kvcaches=None, slot_mapping=slots)
    assert all(torch.equal(as_bytes(c), b) for c, b in zip(caches, before, strict=True))
    gpu.close()


def test_chunks_larger_than_the_staging_buffer() -> None:
    copier = DeviceCopier(torch.device("cpu"), staging_bytes=3 * 16)
    layers = [torch.randint(0, 251, (20, 16), dtype=torch.uint8) for _ in range(2)]
    pages = np.array([19, 3, 4, 5, 0, 7, 11, 2])
    chunks = [np.zeros((2, 5, 16), np.uint8), np.zeros((2, 3, 16), np.uint8)]
    plan = copier.plan([segments_of(pages[:5]), segments_of(pages[5:])], chunks, 1)
    assert [len(batch.index) for batch in plan.batches] == [3, 3, 2]
    copier.gather(layers, range(2), plan, None)
    for layer, rows in enumerate(layers):
        assert (np.concatenate([chunk[layer] for chunk in chunks]) == rows.numpy()[pages]).all()
    copies = [torch.zeros_like(rows) for rows in layers]
    copier.scatter(copies, range(1, 2), plan, None)
    assert not copies[0].any()
    assert torch.equal(copies[1][pages], layers[1][pages])
    assert not copies[1][[1, 6, 8]].any()


@pytest.mark.parametrize(
    ("caches", "what"),
    [
        ([torch.zeros(12, 64, dtype=torch.uint8)] * 2, "2 KV caches for 3 layers"),
        ([torch.zeros(12, 32, dtype=torch.uint8)] * 3, "32 bytes, declared are 64"),
        ([torch.zeros(12, 64, 2, dtype=torch.uint8)[..., 0]] * 3, "one contiguous run"),
        ([torch.zeros(1, 64, dtype=torch.uint8).expand(12, 64)] * 3, "pages overlap"),
        ([(torch.zeros(2), torch.zeros(2))] * 3, "no tensor of pages"),
        (
            [torch.zeros(12, 64, dtype=torch.uint8)] * 2 + [torch.zeros(9, 64, dtype=torch.uint8)],
            "same number and distance",
        ),
    ],
)
def test_caches_that_are_not_as_declared_are_refused(caches: KVCaches, what: str) -> None:
    """Fault 6: another layout than the declared one is refused, and the error prints it."""
    gpu = PagedGPUConnector(opaque(3, 64))
    with pytest.raises(LayoutError, match=what) as caught:
        gpu.register_kv_caches(caches)
    assert "layer_page_bytes=64" in str(caught.value)


def test_other_layouts_are_refused() -> None:
    dense = KVLayout(
        MemoryFormat.KV_2LTD, "float16", 1, (GroupLayout("full", 2, 64),), 2, 8, "test"
    )
    groups = (GroupLayout("full", 2, 64), GroupLayout("window", 2, 64))
    two = KVLayout(MemoryFormat.OPAQUE_PAGES, "uint8", 4, groups, 0, 0, "test")
    for layout in (dense, two):
        with pytest.raises(LayoutError, match="one layer group"):
            PagedGPUConnector(layout)
    with pytest.raises(ValueError, match="copy_threads"):
        PagedGPUConnector(opaque(3, 64), copy_threads=0)
