"""OwnershipContract: the part of the allocator contract that is about who holds what, and its base.

Authors use :class:`kvkeep.testing.allocators.AllocatorContract`, which contains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvkeep.errors import OwnershipError
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import MemoryAllocatorInterface, MemoryObj
from kvkeep.memory.batches import (
    batched_pin,
    batched_ref_count_down,
    batched_ref_count_up,
    batched_unpin,
)
from kvkeep.memory.ownership import References
from kvkeep.memory.paged import PagedAllocator

#: Shape and dtype of the objects that the contract allocates, 3072 bytes.
SHAPE = (2, 3, 8, 16)
DTYPE = torch.float32
OBJECT_BYTES = 3072
#: So many of them must fit, and not one more.
CAPACITY = 8

MakeAllocator = Callable[[], MemoryAllocatorInterface]


class OwnershipContract:
    """Counting, use after free, closing."""

    @pytest.fixture
    def make_allocator(self) -> MakeAllocator:
        """Override it: a function that makes a new allocator with room for CAPACITY objects."""
        raise NotImplementedError

    @pytest.fixture
    def allocator(self, make_allocator: MakeAllocator) -> Iterator[MemoryAllocatorInterface]:
        """An allocator that must be empty and whole again at the end of the test."""
        allocator = make_allocator()
        yield allocator
        report = allocator.memcheck()
        assert (report.num_objects, report.used_bytes) == (0, 0)
        assert report.free_bytes == report.capacity_bytes
        allocator.close()

    def test_a_handle_kept_after_free_raises(self, allocator: MemoryAllocatorInterface) -> None:
        """Fault 15: who keeps an object after giving it back never sees the next owner's bytes."""
        kept = take(allocator)
        kept.ref_count_down()
        with References(take_all(allocator)):
            for use in (
                lambda: kept.array,
                lambda: kept.tensor,
                lambda: kept.byte_array,
                kept.ref_count_up,
                kept.pin,
            ):
                with pytest.raises(OwnershipError, match="after it was given back"):
                    use()

    def test_counts_never_go_negative(self, allocator: MemoryAllocatorInterface) -> None:
        """A second release is an error and changes nothing, whoever got the memory meanwhile."""
        obj = take(allocator)
        with pytest.raises(OwnershipError, match="twice"):
            obj.unpin()
        obj.ref_count_down()
        others = take_all(allocator)
        with pytest.raises(OwnershipError, match="twice"):
            obj.ref_count_down()
        with pytest.raises(OwnershipError, match="twice"):
            obj.unpin()
        assert allocator.memcheck().num_objects == CAPACITY
        assert (obj.ref_count, obj.pin_count) == (0, 0)
        batched_ref_count_down(others)

    def test_memory_is_freed_when_references_and_pins_are_zero(
        self, allocator: MemoryAllocatorInterface
    ) -> None:
        """In either order, and not before."""
        for last in ("unpin", "ref_count_down"):
            obj = take(allocator)
            obj.ref_count_up()
            obj.pin()
            obj.pin()
            obj.ref_count_down()
            obj.unpin()
            assert (obj.ref_count, obj.pin_count, obj.is_pinned) == (1, 1, True)
            first = "ref_count_down" if last == "unpin" else "unpin"
            getattr(obj, first)()
            was_alive = obj.is_alive
            assert allocator.memcheck().num_objects == 1
            getattr(obj, last)()
            assert (was_alive, obj.is_alive) == (True, False)
            assert allocator.memcheck().num_objects == 0

    def test_batched_counts(self, allocator: MemoryAllocatorInterface) -> None:
        """Taking is all or nothing; giving goes on after an error and then reports it."""
        objects = take_all(allocator)
        batched_ref_count_up(objects)
        batched_pin(objects)
        assert {(obj.ref_count, obj.pin_count) for obj in objects} == {(2, 1)}
        batched_unpin(objects)
        batched_ref_count_down(objects)
        objects[4].ref_count_down()
        for take_more in (batched_ref_count_up, batched_pin):
            with pytest.raises(OwnershipError):
                take_more(objects)
        living = objects[:4] + objects[5:]
        assert {(obj.ref_count, obj.pin_count) for obj in living} == {(1, 0)}
        with pytest.raises(OwnershipError, match="twice"):
            batched_ref_count_down(objects)
        assert not any(obj.is_alive for obj in objects)

    @pytest.mark.parametrize("give", [batched_ref_count_down, batched_unpin])
    def test_an_error_in_one_pool_keeps_nothing_of_the_next(
        self,
        allocator: MemoryAllocatorInterface,
        give: Callable[[list[MemoryObj]], None],
    ) -> None:
        """A batch may belong to several pools; giving goes on in those after the error."""
        other = PagedAllocator(Arena(OBJECT_BYTES), OBJECT_BYTES)
        bad, good = take(other), take(allocator)
        bad.ref_count_down()
        if give is batched_unpin:
            good.pin()
            good.ref_count_down()
        with pytest.raises(OwnershipError, match="twice"):
            give([bad, good])
        assert allocator.memcheck().num_objects == 0
        other.close()

    def test_an_exception_leaks_nothing(self, allocator: MemoryAllocatorInterface) -> None:
        """Fault 18: what was allocated before an exception is given back by its owner object."""

        def fail_between() -> None:
            with References() as held:
                held.adopt(take_all(allocator))
                assert allocator.allocate(SHAPE, DTYPE) is None
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_between()
        assert allocator.memcheck().num_objects == 0

    def test_references_give_the_rest_back_after_a_double_release(
        self, allocator: MemoryAllocatorInterface
    ) -> None:
        """The error is reported, and it leaks nothing."""
        held = References([*take_all(allocator), None])
        held.objects[0].ref_count_down()
        with pytest.raises(OwnershipError, match="twice"):
            held.release()
        held.release()
        assert allocator.memcheck().num_objects == 0

    def test_detached_references_belong_to_the_caller(
        self, allocator: MemoryAllocatorInterface
    ) -> None:
        """The owner object no longer gives them back."""
        with References([take(allocator)]) as held:
            objects = held.detach()
        assert objects[0].ref_count == 1
        batched_ref_count_down(objects)

    def test_closing_makes_living_objects_invalid(self, make_allocator: MakeAllocator) -> None:
        """Use is an error and no crash; giving back is none; a view taken before stays readable."""
        allocator = make_allocator()
        obj = take(allocator)
        obj.tensor.fill_(3)
        view = obj.tensor
        allocator.close()
        allocator.close()
        for use in (lambda: obj.array, lambda: obj.tensor, obj.pin, obj.ref_count_up):
            with pytest.raises(OwnershipError):
                use()
        assert view.eq(3).all()
        assert allocator.allocate(SHAPE, DTYPE) is None
        assert allocator.memcheck().num_objects == 1
        obj.ref_count_down()
        with pytest.raises(OwnershipError, match="twice"):
            obj.ref_count_down()
        report = allocator.memcheck()
        assert report == allocator.usage()
        assert (report.capacity_bytes, report.num_objects) == (0, 0)


def take(allocator: MemoryAllocatorInterface) -> MemoryObj:
    """One object of SHAPE; the pool must have room."""
    obj = allocator.allocate(SHAPE, DTYPE)
    assert obj is not None
    return obj


def take_all(allocator: MemoryAllocatorInterface) -> list[MemoryObj]:
    """All objects of SHAPE that fit into an empty pool."""
    objects = allocator.batched_allocate(SHAPE, DTYPE, CAPACITY)
    assert objects is not None
    return objects
