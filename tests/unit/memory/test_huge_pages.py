"""What an engine's memory is advised, read back from the system's own list of mappings."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.memory.placement import HUGE_PAGE_BYTES, advise_huge_pages

SMAPS = Path("/proc/self/smaps")


def advised(address: int) -> bool:
    """The mapping that holds ``address`` has the flag for advised huge pages."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"{address:#x} is in no mapping")


@pytest.fixture
def memory():
    """Five huge pages' worth of memory that nobody has advised; it goes with its last view."""
    mapping = mmap.mmap(-1, 6 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(mapping, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE_BYTES
    return array[start : start + 5 * HUGE_PAGE_BYTES]


def test_only_whole_huge_pages_inside_a_range_are_asked_for(memory) -> None:
    memory[HUGE_PAGE_BYTES + 1000] = 7
    first = memory.ctypes.data
    size = 4 * HUGE_PAGE_BYTES - 100
    assert advise_huge_pages({first + 100: size}) in (0, 3 * HUGE_PAGE_BYTES)
    assert memory[HUGE_PAGE_BYTES + 1000] == 7
    assert not advised(first)
    assert not advised(first + 4 * HUGE_PAGE_BYTES)


def test_too_small_a_range_is_left_alone(memory) -> None:
    assert advise_huge_pages({memory.ctypes.data + 1: HUGE_PAGE_BYTES}) == 0
    assert not advised(memory.ctypes.data)


@pytest.mark.parametrize("wanted", [True, False])
def test_registered_caches_are_advised_where_it_is_wanted(memory, wanted: bool) -> None:
    layout = KVLayout(
        MemoryFormat.OPAQUE_PAGES, "uint8", 4, (GroupLayout("full", 1, 4096),), 0, 0, "test"
    )
    cache = torch.from_numpy(memory).view(-1, 4096)
    cache[:] = 3
    gpu = PagedGPUConnector(layout, huge_pages=wanted)
    gpu.register_kv_caches([cache])
    is_supported = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert advised(memory.ctypes.data + HUGE_PAGE_BYTES) == (wanted and is_supported)
    assert bool((cache == 3).all())
    gpu.close()
