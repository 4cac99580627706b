from __future__ import annotations

import pytest
import torch

from kvkeep.errors import LayoutError
from kvkeep.gpu.dense import DenseGPUConnector
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat

LAYERS, HEADS, SIZE = 3, 2, 8


def dense_layout(dtype: str = "float32", layers: int = LAYERS) -> KVLayout:
    item = getattr(torch, dtype).itemsize
    group = GroupLayout("full", layers, 2 * HEADS * SIZE * item)
    return KVLayout(MemoryFormat.KV_2LTD, dtype, 1, (group,), HEADS, SIZE, "test")


def make_caches(slots: int, dtype: torch.dtype = torch.float32, *, first: str = "slots"):
    """Random caches; ``first`` says what is the outermost dimension in memory."""
    generator = torch.Generator().manual_seed(3)
    caches = []
    for _ in range(LAYERS):
        pair = []
        for _ in range(2):
            values = torch.randn((slots, HEADS, SIZE), generator=generator).to(dtype)
            if first == "heads":
                values = values.transpose(0, 1).contiguous().transpose(0, 1)
            elif first == "elements":
                values = values.transpose(0, 2).contiguous().transpose(0, 2)
            pair.append(values)
        caches.append(tuple(pair))
    return caches


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("first", ["slots", "heads", "elements"])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_out_and_in(
    dtype: str, first: str, layerwise: bool, mapped: bool, native: bool, make_chunks
):
    gpu = DenseGPUConnector(dense_layout(dtype), copy_threads=2 if mapped else 1, native=native)
    caches = make_caches(20, getattr(torch, dtype), first=first)
    chunks = make_chunks(gpu, [8, 5])
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:13] if mapped else None
    used = slots if slots is not None else torch.arange(13)
    where = dict(kvcaches=caches, slot_mapping=slots)
    if layerwise:
        assert len(list(gpu.layerwise_from_gpu(chunks, [0, 8], [8, 13], **where))) == LAYERS
    else:
        gpu.batched_from_gpu(chunks, [0, 8], [8, 13], **where)
    for layer, (k, v) in enumerate(caches):
        assert torch.equal(chunks[0].tensor[0, layer].view(8, HEADS, SIZE), k[used[:8]])
        assert torch.equal(chunks[1].tensor[1, layer].view(5, HEADS, SIZE), v[used[8:]])
    empty = [tuple(torch.zeros_like(t) for t in pair) for pair in caches]
    where["kvcaches"] = empty
    if layerwise:
        assert len(list(gpu.layerwise_to_gpu(chunks, [0, 8], [8, 13], **where))) == LAYERS
    else:
        gpu.batched_to_gpu(chunks, [0, 8], [8, 13], **where)
    rest = torch.tensor(sorted(set(range(20)) - set(used.tolist())))
    for pair, loaded in zip(caches, empty, strict=True):
        for tensor, copy in zip(pair, loaded, strict=True):
            assert torch.equal(copy[used], tensor[used])
            assert not copy[rest].any()
    gpu.close()


def test_the_stored_bytes_do_not_depend_on_strides(make_chunks) -> None:
    gpu = DenseGPUConnector(dense_layout())
    first, second = make_chunks(gpu, [8, 8])
    caches = make_caches(8, first="heads")
    gpu.from_gpu(first, 0, 8, kvcaches=caches, slot_mapping=None)
    straight = [tuple(t.contiguous() for t in pair) for pair in caches]
    gpu.from_gpu(second, 0, 8, kvcaches=straight, slot_mapping=None)
    assert (first.array == second.array).all()
    gpu.close()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
def test_skipped_slots_are_not_written(layerwise: bool, native: bool, make_chunks) -> None:
    gpu = DenseGPUConnector(dense_layout(), native=native)
    caches = make_caches(8)
    chunks = make_chunks(gpu, [8])
    gpu.from_gpu(chunks[0], 0, 8, kvcaches=caches, slot_mapping=None)
    empty = [tuple(torch.zeros_like(t) for t in pair) for pair in caches]
    slots = torch.tensor([-1, -1, 7, 3, -1, 0, 1, -1])
    if layerwise:
        list(gpu.layerwise_to_gpu(chunks, [0], [8], kvcaches=empty, slot_mapping=slots))
    else:
        gpu.batched_to_gpu(chunks, [0], [8], kvcaches=empty, slot_mapping=slots)
    kept = torch.tensor([2, 3, 5, 6])
    for pair, loaded in zip(caches, empty, strict=True):
        for tensor, copy in zip(pair, loaded, strict=True):
            assert torch.equal(copy[slots[kept]], tensor[kept])
            assert not copy[[2, 4, 5, 6]].any()
    gpu.close()


def test_caches_made_in_inference_mode(make_chunks) -> None:
    gpu = DenseGPUConnector(dense_layout())
    with torch.inference_mode():
        caches = make_caches(8)
        empty = [tuple(torch.zeros_like(t) for t in pair) for pair in caches]
    chunks = make_chunks(gpu, [8])
    where = dict(kvcaches=caches, slot_mapping=None)
    gpu.batched_from_gpu(chunks, [0], [8], **where)
    list(gpu.layerwise_to_gpu(chunks, [0], [8], kvcaches=empty, slot_mapping=None))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(caches, empty, strict=True))
    gpu.close()


def test_latent_attention(make_chunks) -> None:
    layout = KVLayout(
        MemoryFormat.KV_MLA_FMT, "float16", 1, (GroupLayout("full", 2, 48),), 1, 24, "test"
    )
    gpu = DenseGPUConnector(layout)
    caches = [torch.randn(6, 1, 24).half() for _ in range(2)]
    gpu.register_kv_caches(caches)
    chunks = make_chunks(gpu, [6])
    gpu.from_gpu(chunks[0], 0, 6, kvcaches=None, slot_mapping=None)
    assert chunks[0].metadata.shape == (1, 2, 6, 24)
    assert torch.equal(chunks[0].tensor[0, 1], caches[1][:, 0])
    gpu.close()


def test_wrong_arguments_are_named(make_chunks) -> None:
    gpu = DenseGPUConnector(dense_layout())
    caches = make_caches(8)
    chunks = make_chunks(gpu, [8, 4])
    with pytest.raises(ValueError, match="token 8 has slot 8"):
        gpu.batched_from_gpu(chunks, [0, 8], [8, 12], kvcaches=caches, slot_mapping=None)
    with pytest.raises(ValueError, match="token 2 has slot -1"):
        slots = torch.tensor([0, 1, -1, 3, 4, 5, 6, 7])
        gpu.from_gpu(chunks[0], 0, 8, kvcaches=caches, slot_mapping=slots)
    with pytest.raises(ValueError, match="do not fill"):
        gpu.from_gpu(chunks[1], 0, 8, kvcaches=caches, slot_mapping=None)
    with pytest.raises(ValueError, match="none are registered"):
        gpu.from_gpu(chunks[1], 0, 4, kvcaches=None, slot_mapping=None)
    gpu.close()


def test_caches_that_are_not_as_declared_are_refused() -> None:
    """Fault 6: another layout than the declared one is refused, and the error prints it."""
    gpu = DenseGPUConnector(dense_layout())
    wrong = {
        "2 KV caches": make_caches(4)[:2],
        "has 1 tensors": [pair[:1] for pair in make_caches(4)],
        "torch.float16": make_caches(4, torch.float16),
        r"shape \(4, 8, 2\)": [tuple(t.transpose(1, 2) for t in p) for p in make_caches(4)],
        "different lengths": [(k, v[:3]) for k, v in make_caches(4)],
    }
    for what, caches in wrong.items():
        with pytest.raises(LayoutError, match=what) as caught:
            gpu.register_kv_caches(caches)
        assert "head_size=8" in str(caught.value)
    with pytest.raises(LayoutError, match="page size of 1"):
        group = GroupLayout("full", 2, 64)
        layout = KVLayout(MemoryFormat.KV_2LTD, "float16", 16, (group,), 2, 8, "test")
        DenseGPUConnector(layout)
    gpu.close()
