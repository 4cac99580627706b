from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvkeep.errors import LayoutError
from kvkeep.gpu.dense import DenseGPUConnector
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.tokens import ChunkedTokenDatabase
from support.paged_engine import PagedEngine


def filled(num_pages: int, num_layers: int = 3, page_bytes: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (num_pages, page_bytes)
    return [
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        for _ in range(num_layers)
    ]


@pytest.mark.parametrize("num_pages", [1, 2, 3, 4, 12])
def test_it_leaves_every_byte_as_it_was(num_pages: int) -> None:
    caches = filled(num_pages)
    before = [cache.clone() for cache in caches]
    gpu = PagedGPUConnector(PagedEngine(num_pages=1).layout)
    gpu.register_kv_caches(caches)
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
    gpu.close()


def test_layers_that_share_memory_are_refused() -> None:
    """Fault 6: a layout whose layers overlap looks right and does not survive the self-test."""
    storage = filled(1, 1, 12 * 64 + 2 * 32)[0][0]
    before = storage.clone()
    caches = [storage.as_strided((12, 64), (64, 1), 32 * layer) for layer in range(3)]
    gpu = PagedGPUConnector(PagedEngine(num_pages=12).layout)
    with pytest.raises(LayoutError, match="layers or pages overlap") as caught:
        gpu.register_kv_caches(caches)
    assert "kvkeep.testing" in str(caught.value)
    assert torch.equal(storage, before)
    with pytest.raises(ValueError, match="none are registered"):
        gpu.batched_to_gpu([], [], [], kvcaches=None, slot_mapping=torch.zeros(0).long())
    gpu.close()


class _OnePageOff(PagedGPUConnector):
    """Writes into the page before the right one, as an engine with a reserved page 0 would want."""

    def batched_to_gpu(self, memory_objs, starts, ends, *, kvcaches, slot_mapping, offset=0):
        wrong = (slot_mapping - self.layout.page_size).clamp(min=0)
        wrong = torch.where(slot_mapping < self.layout.page_size, slot_mapping, wrong)
        where = dict(kvcaches=kvcaches, slot_mapping=wrong, offset=offset)
        super().batched_to_gpu(memory_objs, starts, ends, **where)


class _StoresNothing(PagedGPUConnector):
    def batched_from_gpu(self, memory_objs, starts, ends, *, kvcaches, slot_mapping, offset=0):
        for obj in memory_objs:
            obj.array[:] = 1


class _WritesBeside(PagedGPUConnector):
    def batched_to_gpu(self, memory_objs, starts, ends, *, kvcaches, slot_mapping, offset=0):
        where = dict(kvcaches=kvcaches, slot_mapping=slot_mapping, offset=offset)
        super().batched_to_gpu(memory_objs, starts, ends, **where)
        self.seen[1][1] = 0

    seen: list[torch.Tensor]


def test_a_connector_that_copies_to_the_wrong_place_is_refused() -> None:
    caches = filled(12)
    before = [cache.clone() for cache in caches]
    layout = PagedEngine(num_pages=12).layout
    for kind, what in (
        (_OnePageOff, "stored, wiped and loaded"),
        (_StoresNothing, "reads other bytes"),
        (_WritesBeside, "beside them"),
    ):
        gpu = kind(layout)
        gpu.seen = caches
        with pytest.raises(LayoutError, match=what):
            gpu.register_kv_caches(caches)
        assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
        gpu.close()


def test_dense_caches_are_tested_too() -> None:
    group = GroupLayout("full", 2, 2 * 16 * 2)
    layout = KVLayout(MemoryFormat.KV_2LTD, "bfloat16", 1, (group,), 2, 8, "test")
    gpu = DenseGPUConnector(layout)
    good = [(torch.randn(9, 2, 8).bfloat16(), torch.randn(9, 2, 8).bfloat16()) for _ in range(2)]
    before = [(k.clone(), v.clone()) for k, v in good]
    gpu.register_kv_caches(good)
    for pair, old in zip(good, before, strict=True):
        assert torch.equal(pair[0], old[0])
        assert torch.equal(pair[1], old[1])
    shared = torch.randn(9, 2, 8).bfloat16()
    with pytest.raises(LayoutError, match="overlap"):
        gpu.register_kv_caches([good[0], (shared, shared)])
    gpu.close()


def test_two_layouts_of_one_shape_are_told_apart_by_their_declaration() -> None:
    """Fault 7: with two KV heads two orders have one shape; the declaration decides, no guess."""
    caches = [torch.zeros(12, 2, 2, 16, dtype=torch.uint8) for _ in range(3)]
    heads_first = replace(PagedEngine(num_pages=1).layout, engine="pages of [head, token]")
    tokens_first = replace(heads_first, engine="pages of [token, head]")
    keys = []
    for layout in (heads_first, tokens_first):
        gpu = PagedGPUConnector(layout)
        gpu.register_kv_caches(caches)  # the same bytes per page: both are right about what moves
        identity = CacheIdentity("model", "1", layout, chunk_size=8)
        keys.append(ChunkedTokenDatabase(identity).process_tokens(list(range(16))).keys)
        gpu.close()
    assert not set(keys[0]) & set(keys[1])


def test_k_and_v_as_first_dimension_are_no_pages() -> None:
    """Fault 7: [2, pages, ...] declared as [pages, ...] is refused, also with two pages."""
    gpu = PagedGPUConnector(PagedEngine(num_pages=1).layout)
    for num_pages in (2, 12):
        with pytest.raises(LayoutError, match="declared are 64"):
            gpu.register_kv_caches([torch.zeros(2, num_pages, 32, dtype=torch.float32)] * 3)
    gpu.close()
