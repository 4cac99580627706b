"""initialize_allocator: every choice, and the report that says what was chosen."""

from __future__ import annotations

import mmap
import os
import uuid

import pytest
import torch

from kvkeep.errors import OwnershipError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.allocators import MixedMemoryAllocator, PagedCpuGpuMemoryAllocator
from kvkeep.memory.arena import Arena
from kvkeep.memory.factory import initialize_allocator, report_on, tensor_pool
from kvkeep.memory.placement import Choice, ask_for_huge_pages, choose_node

PAGE = mmap.PAGESIZE
U8 = torch.uint8


def test_the_report_says_what_was_chosen_and_why(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    allocator = initialize_allocator(
        9 * 1024,
        chunk_bytes=1000,
        buffer_bytes=1024,
        huge_pages=False,
        numa=choose_node(None, None),
    )
    report = report_on(allocator, Choice("size", "9216 bytes", "as set"))
    assert report.allocator == "MixedMemoryAllocator"
    assert report.size_bytes == 9 * 1024
    assert report.lines() == [
        "MixedMemoryAllocator over 9216 bytes",
        "size: 9216 bytes (as set)",
        "memory: private to the process (no name was given)",
        "huge pages: not asked for (as set)",
        "NUMA node: any (the worker has no CUDA device)",
        "slots: 8 of 1024 bytes (every chunk has one)",
        "pinned memory: no (there is no CUDA device)",
        "byte buffers: 1024 bytes (kept apart from KV)",
    ]
    with pytest.raises(KeyError):
        report.choice("colour")
    allocator.close()


def test_pinned_memory_where_cuda_is(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    allocator = initialize_allocator(8192, chunk_bytes=1024)
    assert report_on(allocator).choice("pinned memory").chosen == "as it is used"
    allocator.close()


def test_slots_that_others_can_address() -> None:
    """What PoolExport says is where the bytes are, seen from a second mapping of the arena."""
    name = f"export-{uuid.uuid4().hex}"
    allocator = initialize_allocator(
        10 * PAGE, chunk_bytes=PAGE + 1, is_registrable=True, shared_name=name
    )
    assert isinstance(allocator, PagedCpuGpuMemoryAllocator)
    export = allocator.export()
    assert (export.shared_name, export.base_offset) == (name, 0)
    assert (export.slot_bytes, export.num_slots) == (2 * PAGE, 5)
    objects = allocator.batched_allocate((PAGE + 1,), U8, 5)
    other = Arena.attach(name)
    for number, obj in enumerate(objects):
        obj.array[:] = number + 1
        start = export.base_offset + allocator.slot_of(obj) * export.slot_bytes
        assert (other.array[start : start + obj.size_bytes] == number + 1).all()
        assert obj.array.__array_interface__["data"][0] % PAGE == 0
    other.close()
    assert report_on(allocator).allocator == "PagedCpuGpuMemoryAllocator"
    assert report_on(allocator).choice("memory").chosen == f"shared as {name}"
    gone = objects[0]
    for obj in objects:
        obj.ref_count_down()
    with pytest.raises(OwnershipError, match="in no slot"):
        allocator.slot_of(gone)
    assert allocator.memcheck().used_bytes == 0
    allocator.close()
    with pytest.raises(OwnershipError, match="after it was closed"):
        allocator.export()


def test_byte_buffers_take_slots_of_a_registrable_pool() -> None:
    allocator = initialize_allocator(4 * PAGE, chunk_bytes=100, is_registrable=True)
    buffer = allocator.allocate((5,), U8, MemoryFormat.BINARY)
    assert allocator.slot_of(buffer) == 0
    buffer.ref_count_down()
    allocator.close()


def test_a_registrable_pool_starts_on_a_memory_page() -> None:
    arena = Arena(4 * PAGE)
    with pytest.raises(ValueError, match="memory page"):
        PagedCpuGpuMemoryAllocator(arena, 64, offset=64)
    made = PagedCpuGpuMemoryAllocator(arena, 64, offset=PAGE)
    assert made.export().base_offset == PAGE
    made.close()


@pytest.mark.parametrize(("chunk_bytes", "buffer_bytes"), [(None, 0), (64, 64)])
def test_what_a_registrable_pool_cannot_be(chunk_bytes, buffer_bytes) -> None:
    with pytest.raises(ValueError, match="equal slots"):
        initialize_allocator(
            8192, chunk_bytes=chunk_bytes, buffer_bytes=buffer_bytes, is_registrable=True
        )


@pytest.mark.parametrize(
    ("mode", "is_shared", "chosen"),
    [
        ("always [madvise] never", False, "yes"),
        ("always madvise [never]", False, "no"),
        ("always within_size [advise] never deny force", True, "yes"),
        ("always within_size advise [never] deny force", True, "no"),
        ("always within_size advise never [deny] force", True, "no"),
    ],
)
def test_huge_pages_are_what_the_systems_switch_says(tmp_path, mode, is_shared, chosen) -> None:
    folder = tmp_path / "kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / ("shmem_enabled" if is_shared else "enabled")).write_text(mode + "\n")
    with mmap.mmap(-1, 1 << 22) as mapping:
        choice = ask_for_huge_pages(mapping, is_shared=is_shared, wanted=True, sysfs=tmp_path)
    assert choice.chosen == chosen


def test_a_system_that_says_nothing_about_huge_pages(tmp_path) -> None:
    with mmap.mmap(-1, 1 << 22) as mapping:
        choice = ask_for_huge_pages(mapping, is_shared=False, wanted=True, sysfs=tmp_path)
    assert choice.chosen == "asked for"


def test_the_pool_of_kv() -> None:
    mixed = initialize_allocator(4096, chunk_bytes=256, buffer_bytes=1024)
    assert isinstance(mixed, MixedMemoryAllocator)
    assert tensor_pool(mixed) is mixed.tensor_allocator
    mixed.close()
    with pytest.raises(TypeError, match="int"):
        tensor_pool(os.getpid())
