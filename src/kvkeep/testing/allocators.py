"""OwnershipContract: the part of the allocator contract that is about who holds what, and its base.

Authors use :class:`kvkeep.testing.allocators.AllocatorContract`, which contains it.

AllocatorContract: what every allocator must do, as a pytest class.

Subclass it, override the fixture ``make_allocator``, and pytest runs all of it:

    class TestMyAllocator(AllocatorContract):
        @pytest.fixture
        def make_allocator(self):
            return lambda: MyAllocator(CAPACITY * OBJECT_BYTES)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvkeep.errors import OwnershipError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.allocators import PagedAllocator
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import (
    MemoryAllocatorInterface,
    MemoryObj,
    References,
    batched_pin,
    batched_ref_count_down,
    batched_ref_count_up,
    batched_unpin,
)

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


__all__ = ["CAPACITY", "DTYPE", "OBJECT_BYTES", "SHAPE", "AllocatorContract"]


class AllocatorContract(OwnershipContract):
    """Tests that an allocator of :data:`CAPACITY` objects of :data:`OBJECT_BYTES` must pass."""

    def test_an_object_is_what_was_asked_for(self, allocator: MemoryAllocatorInterface) -> None:
        """Shape, dtype, format, size, one reference, writable."""
        obj = take(allocator)
        assert obj.metadata.shape == SHAPE
        assert obj.metadata.dtype == DTYPE
        assert obj.metadata.fmt is MemoryFormat.KV_2LTD
        assert obj.size_bytes == OBJECT_BYTES == obj.array.size == len(obj.byte_array)
        assert (obj.ref_count, obj.pin_count, obj.is_alive) == (1, 0, True)
        obj.byte_array[5] = 7
        assert obj.array[5] == 7
        obj.ref_count_down()
        assert not obj.is_alive

    def test_bulk_tensors_are_layer_major(self, allocator: MemoryAllocatorInterface) -> None:
        """A layer of a chunk is one range of its bytes."""
        obj = take(allocator)
        obj.tensor.zero_()
        obj.tensor[:, 1] = torch.ones(SHAPE[0], *SHAPE[2:])
        layer_bytes = OBJECT_BYTES // SHAPE[1]
        floats = torch.from_numpy(obj.array).view(DTYPE).view(SHAPE[1], -1)
        assert floats[1].eq(1).all()
        assert floats[0].eq(0).all()
        assert floats[2].eq(0).all()
        assert floats[1].nbytes == layer_bytes
        obj.ref_count_down()

    @pytest.mark.parametrize("fmt", list(MemoryFormat))
    def test_every_format_has_its_shape(
        self, allocator: MemoryAllocatorInterface, fmt: MemoryFormat
    ) -> None:
        """The tensor has the shape that was asked for and writes every byte of the object."""
        shape = {
            MemoryFormat.KV_2LTD: (2, 3, 8, 8),
            MemoryFormat.KV_MLA_FMT: (1, 3, 8, 8),
            MemoryFormat.KV_T2D: (8, 2, 8),
            MemoryFormat.KV_2TD: (2, 8, 8),
            MemoryFormat.OPAQUE_PAGES: (3, 4, 32),
            MemoryFormat.BINARY: (100,),
        }[fmt]
        dtype = torch.uint8 if len(shape) != 4 else torch.bfloat16
        obj = allocator.allocate(shape, dtype, fmt)
        assert obj is not None
        obj.array[:] = 255
        obj.tensor.zero_()
        assert obj.tensor.shape == shape
        assert obj.tensor.dtype == dtype
        assert not obj.array.any()
        obj.ref_count_down()

    @pytest.mark.parametrize("shape", [(), (0,), (2, 0, 4), (4, -1), (-2, -2)])
    def test_a_shape_without_size_is_an_error(
        self, allocator: MemoryAllocatorInterface, shape: tuple[int, ...]
    ) -> None:
        """Neither zero nor negative sizes."""
        with pytest.raises(ValueError, match="shape"):
            allocator.allocate(shape, DTYPE)

    def test_a_batch_may_be_empty_but_not_negative(
        self, allocator: MemoryAllocatorInterface
    ) -> None:
        """Zero objects are a list of none."""
        assert allocator.batched_allocate(SHAPE, DTYPE, 0) == []
        with pytest.raises(ValueError, match="batch"):
            allocator.batched_allocate(SHAPE, DTYPE, -1)

    def test_a_full_pool_answers_none(self, allocator: MemoryAllocatorInterface) -> None:
        """And has room again once something is released."""
        objects = take_all(allocator)
        assert allocator.allocate(SHAPE, DTYPE) is None
        objects.pop().ref_count_down()
        objects.append(take(allocator))
        batched_ref_count_down(objects)

    def test_a_batch_is_all_or_nothing(self, allocator: MemoryAllocatorInterface) -> None:
        """Fault 26: a batch that does not fit takes nothing, not even for a moment afterwards."""
        held = allocator.batched_allocate(SHAPE, DTYPE, 3)
        assert held is not None
        before = allocator.memcheck()
        assert allocator.batched_allocate(SHAPE, DTYPE, CAPACITY - 2) is None
        assert allocator.memcheck() == before
        rest = allocator.batched_allocate(SHAPE, DTYPE, CAPACITY - 3)
        assert rest is not None
        batched_ref_count_down(held + rest)

    def test_objects_do_not_share_bytes(self, allocator: MemoryAllocatorInterface) -> None:
        """Each keeps the pattern that was written into it."""
        objects = take_all(allocator)
        for number, obj in enumerate(objects):
            obj.array[:] = number
        for number, obj in enumerate(objects):
            assert (obj.array == number).all()
        batched_ref_count_down(objects)

    def test_can_ever_fit(self, make_allocator: MakeAllocator) -> None:
        """Fault 25: what can never fit is known without waiting, also in a full pool."""
        allocator = make_allocator()
        with References(take_all(allocator)):
            assert allocator.can_ever_fit(OBJECT_BYTES, CAPACITY)
            assert allocator.can_ever_fit(1, 0)
            assert not allocator.can_ever_fit(OBJECT_BYTES, CAPACITY + 1)
            assert not allocator.can_ever_fit(OBJECT_BYTES * (CAPACITY + 1))
        assert allocator.allocate((OBJECT_BYTES * (CAPACITY + 1),), torch.uint8) is None
        allocator.close()
        assert not allocator.can_ever_fit(OBJECT_BYTES)

    def test_room_for(self, make_allocator: MakeAllocator) -> None:
        """How many more fit is known without trying."""
        allocator = make_allocator()
        objects: list[MemoryObj] = []
        for number in range(CAPACITY):
            assert allocator.room_for(OBJECT_BYTES) == CAPACITY - number
            objects.append(take(allocator))
        assert allocator.room_for(1) == 0
        batched_ref_count_down(objects)
        assert allocator.room_for(OBJECT_BYTES) == CAPACITY
        assert allocator.room_for(OBJECT_BYTES * (CAPACITY + 1)) == 0
        allocator.close()
        assert allocator.room_for(OBJECT_BYTES) == 0

    def test_counters_and_proof_agree(self, allocator: MemoryAllocatorInterface) -> None:
        """``usage`` says without a walk what ``memcheck`` proves with one."""
        objects: list[MemoryObj] = []
        for _ in range(CAPACITY):
            report = allocator.memcheck()
            assert report == allocator.usage()
            assert report.num_objects == len(objects)
            assert report.used_bytes + report.free_bytes == report.capacity_bytes
            assert report.used_bytes >= len(objects) * OBJECT_BYTES
            objects.append(take(allocator))
        batched_ref_count_down(objects)
        assert allocator.memcheck() == allocator.usage()

    def test_waiting_ends_with_its_deadline(self, allocator: MemoryAllocatorInterface) -> None:
        """Nothing is released, so nothing is reported."""
        assert not allocator.wait_for_release(allocator.release_count, 0.01)

    def test_a_release_before_the_wait_is_not_missed(
        self, allocator: MemoryAllocatorInterface
    ) -> None:
        """It is seen in the count, so the wait ends at once."""
        obj = take(allocator)
        seen = allocator.release_count
        obj.ref_count_down()
        assert allocator.wait_for_release(seen, 0.0)

    @pytest.mark.parametrize("release", ["ref_count_down", "unpin", "close"])
    def test_a_release_wakes_who_waits(self, make_allocator: MakeAllocator, release: str) -> None:
        """Every reference and pin that is given back does, and so does closing."""
        allocator = make_allocator()
        obj = take(allocator)
        obj.ref_count_up()
        obj.pin()
        seen = allocator.release_count
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(allocator.wait_for_release, seen, 20.0)
            getattr(allocator if release == "close" else obj, release)()
            assert answer.result(timeout=30)
        allocator.close()

    def test_threads_do_not_disturb_each_other(self, allocator: MemoryAllocatorInterface) -> None:
        """Eight threads allocate, count and release; nobody sees another's bytes, nothing leaks."""
        start = threading.Barrier(8)

        def work(mark: int) -> int:
            start.wait(timeout=20)
            got = 0
            for size in itertools.islice(itertools.cycle((1, 2, 3)), 300):
                objects = allocator.batched_allocate(SHAPE, DTYPE, size)
                if objects is None:
                    continue
                with References(objects):
                    got += 1
                    for obj in objects:
                        obj.array[:] = mark
                    batched_pin(objects)
                    batched_ref_count_up(objects)
                    assert all((obj.array == mark).all() for obj in objects)
                    batched_ref_count_down(objects)
                    batched_unpin(objects)
            return got

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(work, range(8))) > 0
