"""HostPinning against a runtime that records its calls; a CUDA device is not needed."""

from __future__ import annotations

import logging

import numpy as np
import torch

from kvkeep.memory.allocators import PagedAllocator
from kvkeep.memory.arena import Arena, HostPinning


class RecordingRuntime:
    """Stands in for torch.cuda.cudart(): keeps what is registered, refuses beyond a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.ranges: dict[int, int] = {}

    def cudaHostRegister(self, address, size, flags):
        assert flags == 0
        assert all(address + size <= a or a + s <= address for a, s in self.ranges.items())
        if sum(self.ranges.values()) + size > self.limit_bytes:
            return 2
        self.ranges[address] = size
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.ranges.pop(address, None) else 1


def test_steps_are_pinned_when_they_are_first_used():
    runtime = RecordingRuntime(1 << 30)
    array = np.zeros(2500, dtype=np.uint8)
    pinning = HostPinning(array, 1000, runtime)
    assert runtime.ranges == {}
    covered = []
    for end in (1, 1000, 1001, 2500):
        pinning.cover(end)
        covered.append(pinning.pinned_bytes)
    base = array.__array_interface__["data"][0]
    assert covered == [1000, 1000, 2000, 2500]
    assert runtime.ranges == {base: 1000, base + 1000: 1000, base + 2000: 500}
    pinning.close()
    pinning.close()
    pinning.cover(2500)
    assert runtime.ranges == {}


def test_a_refusal_is_logged_once_and_is_no_error(caplog):
    runtime = RecordingRuntime(1500)
    pinning = HostPinning(np.zeros(4000, dtype=np.uint8), 1000, runtime)
    with caplog.at_level(logging.WARNING):
        pinning.cover(4000)
        pinning.cover(4000)
    assert pinning.pinned_bytes == 1000
    assert len(caplog.records) == 1
    pinning.close()
    assert runtime.ranges == {}


def test_a_paged_pool_pins_no_more_than_it_uses_and_no_slot_crosses_a_border(monkeypatch):
    runtime = RecordingRuntime(1 << 40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slot_bytes = 3 << 20
    allocator = PagedAllocator(Arena(1 << 30), slot_bytes)
    assert runtime.ranges == {}
    objects = allocator.batched_allocate((slot_bytes,), torch.uint8, 30)
    assert sorted(runtime.ranges.values()) == [21 * slot_bytes] * 2
    for obj in objects:
        address = obj.array.__array_interface__["data"][0]
        assert any(
            a <= address and address + slot_bytes <= a + s for a, s in runtime.ranges.items()
        )
        obj.ref_count_down()
    assert allocator.memcheck().used_bytes == 0
    allocator.close()
    assert runtime.ranges == {}
