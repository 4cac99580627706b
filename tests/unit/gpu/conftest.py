"""Chunks in a real pool, which must be whole again after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvkeep.gpu.base import GPUConnectorInterface
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.factory import initialize_allocator

MakeChunks = Callable[[GPUConnectorInterface, Sequence[int]], list[MemoryObj]]


@pytest.fixture
def make_chunks() -> Iterator[MakeChunks]:
    """make_chunks(connector, token counts): memory objects filled with 0xAB."""
    allocator = initialize_allocator(1 << 22, chunk_bytes=None, huge_pages=False)
    made: list[MemoryObj] = []

    def make(connector: GPUConnectorInterface, sizes: Sequence[int]) -> list[MemoryObj]:
        objs = []
        for size in sizes:
            shape, dtype, fmt = connector.chunk_shape(size)
            obj = allocator.allocate(shape, dtype, fmt)
            assert obj is not None
            obj.array[:] = np.uint8(0xAB)
            objs.append(obj)
        made.extend(objs)
        return objs

    yield make
    for obj in made:
        obj.ref_count_down()
    report = allocator.memcheck()
    assert report.used_bytes == 0
    assert report.free_bytes == report.capacity_bytes
    allocator.close()
