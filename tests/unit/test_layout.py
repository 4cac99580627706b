"""Layouts: sizes, ranges, and the refusal of what was not declared properly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import LayoutError
from kvkeep.layout import DTYPE_SIZES, GroupLayout, KVLayout, MemoryFormat


def layout(*groups: GroupLayout, page_size: int = 16) -> KVLayout:
    return KVLayout(
        fmt=MemoryFormat.OPAQUE_PAGES,
        dtype="uint8",
        page_size=page_size,
        groups=groups or (GroupLayout("full", 2, 64),),
        num_kv_heads=0,
        head_size=0,
        engine="engine",
    )


@pytest.mark.parametrize("name", sorted(DTYPE_SIZES))
def test_dtype_names_are_torch_names_of_that_size(name):
    """Fault 11: a dtype has one name, and that name means one torch dtype."""
    dtype = getattr(torch, name)
    assert str(dtype) == f"torch.{name}"
    assert dtype.itemsize == DTYPE_SIZES[name]


group_lists = st.lists(
    st.builds(
        GroupLayout,
        name=st.just("group"),
        num_layers=st.integers(1, 5),
        layer_page_bytes=st.integers(1, 100),
    ),
    min_size=1,
    max_size=4,
)


@given(group_lists, st.integers(1, 32), st.integers(0, 8))
def test_layers_tile_the_chunk(groups, page_size, num_pages):
    declared = layout(*groups, page_size=page_size)
    num_tokens = num_pages * page_size
    ranges = declared.layer_ranges(num_tokens)
    assert len(ranges) == declared.num_layers == sum(group.num_layers for group in groups)
    position = 0
    sizes = [group.layer_page_bytes for group in groups for _ in range(group.num_layers)]
    for (start, end), size in zip(ranges, sizes, strict=True):
        assert start == position
        assert end - start == num_pages * size
        position = end
    assert position == declared.chunk_bytes(num_tokens) == num_pages * declared.page_bytes


def test_tokens_that_are_no_whole_pages_are_refused():
    with pytest.raises(LayoutError, match="multiple of the engine's page"):
        layout().chunk_bytes(17)
    with pytest.raises(LayoutError):
        layout().layer_ranges(15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float7"}, "unknown KV dtype 'float7'"),
        ({"fmt": MemoryFormat.BINARY}, "BINARY"),
        ({"fmt": MemoryFormat.KV_T2D}, "KV_T2D"),
        ({"fmt": MemoryFormat.KV_2TD}, "KV_2TD"),
        ({"page_size": 0}, "page size"),
        ({"groups": ()}, "group"),
        ({"engine": ""}, "engine"),
    ],
)
def test_an_unknown_or_incomplete_layout_is_refused_with_what_it_was(changes, message):
    """Fault 6: a layout that nobody declared is an error that prints it, never a guess."""
    with pytest.raises(LayoutError, match=message):
        replace(layout(), **changes)


@pytest.mark.parametrize("changes", [{"num_layers": 0}, {"layer_page_bytes": 0}])
def test_an_empty_group_is_refused(changes):
    with pytest.raises(LayoutError, match="GroupLayout"):
        replace(GroupLayout("full", 1, 1), **changes)
