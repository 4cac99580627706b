"""Random allocations, counts and releases against a dict model, for every allocator."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvkeep.errors import OwnershipError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.allocators import GeneralAllocator, PagedAllocator
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import batched_ref_count_down, batched_unpin
from kvkeep.memory.factory import initialize_allocator

#: Small, so that it is often full and in pieces.
POOL_BYTES = 64 * 12
MAX_SIZE = 192
FORMATS = (MemoryFormat.BINARY, MemoryFormat.OPAQUE_PAGES)


class Entry:
    """What the model knows of a living object."""

    def __init__(self, obj, pattern):
        self.obj, self.pattern = obj, pattern
        self.refs, self.pins = 1, 0


class AllocatorMachine(RuleBasedStateMachine):
    """Every object carries a pattern of its own, which nobody else may overwrite."""

    make = None

    @initialize()
    def start(self):
        self.allocator = type(self).make()
        self.entries: list[Entry] = []
        self.dead: list = []
        self.patterns = itertools.cycle(range(1, 256))
        self.count_before = 0  # release_count at the last look
        self.is_released = False  # something went back since then

    def _add(self, obj):
        entry = Entry(obj, next(self.patterns))
        obj.array[:] = entry.pattern
        self.entries.append(entry)

    def _check_refusal(self, size, count, fmt):
        """None was answered: a full walk shows that there is indeed no room."""
        _, free = self.ranges(fmt)
        allocator = self._pool(fmt)
        if isinstance(allocator, PagedAllocator):
            room = sum((end - start) // allocator.slot_bytes for start, end in free)
            assert room < count or size > allocator.slot_bytes
        else:
            rounded = -(-size // 64) * 64
            assert sum((end - start) // rounded for start, end in free) < count

    def _pool(self, fmt):
        pool = getattr(self.allocator, "tensor_allocator", self.allocator)
        return getattr(self.allocator, "buffer_allocator", pool) if fmt == FORMATS[0] else pool

    def ranges(self, fmt):
        pool = self._pool(fmt)
        with pool.count_lock:
            return pool._ranges_locked()

    @rule(size=st.integers(1, MAX_SIZE), count=st.integers(0, 4), fmt=st.sampled_from(FORMATS))
    def batched_allocate(self, size, count, fmt):
        before = self.allocator.usage()
        room = self.allocator.room_for(size, fmt)
        objects = self.allocator.batched_allocate((size,), torch.uint8, count, fmt)
        if objects is None:
            assert self.allocator.usage() == before
            self._check_refusal(size, count, fmt)
            return
        assert len(objects) == count <= room
        for obj in objects:
            self._add(obj)

    @rule(size=st.integers(1, MAX_SIZE), fmt=st.sampled_from(FORMATS))
    def allocate(self, size, fmt):
        obj = self.allocator.allocate((size,), torch.uint8, fmt)
        if obj is None:
            self._check_refusal(size, 1, fmt)
        else:
            self._add(obj)

    @rule(size=st.integers(MAX_SIZE + 1, 10_000))
    def too_large(self, size):
        if not self.allocator.can_ever_fit(size):
            assert self.allocator.allocate((size,), torch.uint8) is None

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), pins=st.booleans())
    def take(self, data, pins):
        entry = data.draw(st.sampled_from(self.entries))
        if pins:
            entry.obj.pin()
            entry.pins += 1
        else:
            entry.obj.ref_count_up()
            entry.refs += 1

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), pins=st.booleans())
    def give(self, data, pins):
        entry = data.draw(st.sampled_from(self.entries))
        held = entry.pins if pins else entry.refs
        release = entry.obj.unpin if pins else entry.obj.ref_count_down
        if not held:
            with pytest.raises(OwnershipError, match="twice"):
                release()
            return
        release()
        self.is_released = True
        if pins:
            entry.pins -= 1
        else:
            entry.refs -= 1
        self._sweep()

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def give_several(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.entries), unique=True, max_size=8))
        with_refs = [entry for entry in chosen if entry.refs]
        with_pins = [entry for entry in chosen if entry.pins]
        batched_ref_count_down([entry.obj for entry in with_refs])
        batched_unpin([entry.obj for entry in with_pins])
        for entry in with_refs:
            entry.refs -= 1
        for entry in with_pins:
            entry.pins -= 1
        self.is_released |= bool(with_refs or with_pins)
        self._sweep()

    def _sweep(self):
        self.dead += [entry.obj for entry in self.entries if not entry.refs + entry.pins]
        self.entries = [entry for entry in self.entries if entry.refs + entry.pins]

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def use_after_free(self, data):
        obj = data.draw(st.sampled_from(self.dead))
        for use in (lambda: obj.array, obj.ref_count_up, obj.ref_count_down, obj.pin, obj.unpin):
            with pytest.raises(OwnershipError):
                use()

    @invariant()
    def all_is_as_the_model_says(self):
        if not hasattr(self, "allocator"):
            return
        report = self.allocator.memcheck()
        assert report == self.allocator.usage()
        assert report.num_objects == len(self.entries)
        assert report.used_bytes + report.free_bytes == report.capacity_bytes
        count = self.allocator.release_count
        assert (count > self.count_before) == self.is_released
        self.count_before, self.is_released = count, False
        for entry in self.entries:
            assert (entry.obj.ref_count, entry.obj.pin_count) == (entry.refs, entry.pins)
            assert (entry.obj.array == entry.pattern).all()

    def teardown(self):
        if not hasattr(self, "allocator"):
            return
        for entry in self.entries:
            for _ in range(entry.refs):
                entry.obj.ref_count_down()
            for _ in range(entry.pins):
                entry.obj.unpin()
        report = self.allocator.memcheck()
        assert (report.used_bytes, report.num_objects) == (0, 0)
        self.allocator.close()


class PagedMachine(AllocatorMachine):
    make = staticmethod(lambda: PagedAllocator(Arena(POOL_BYTES), 128))


class GeneralMachine(AllocatorMachine):
    make = staticmethod(lambda: GeneralAllocator(Arena(POOL_BYTES)))


class MixedMachine(AllocatorMachine):
    make = staticmethod(
        lambda: initialize_allocator(POOL_BYTES, chunk_bytes=128, buffer_bytes=POOL_BYTES // 2)
    )


_SETTINGS = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestPagedMachine = PagedMachine.TestCase
TestGeneralMachine = GeneralMachine.TestCase
TestMixedMachine = MixedMachine.TestCase
TestPagedMachine.settings = _SETTINGS
TestGeneralMachine.settings = _SETTINGS
TestMixedMachine.settings = _SETTINGS
