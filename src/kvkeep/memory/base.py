"""Pool memory: MemoryObj, and what an allocator promises.

A MemoryObj is a view of pool memory with a reference count and a pin count. It goes back to its
allocator exactly when both are zero. Nobody outside ``memory/`` and ``backends/local_cpu.py``
counts by hand: everybody else uses :class:`kvkeep.memory.base.References` or a lease. Callable
from any thread.

Counting many memory objects at once: their allocator's lock is taken once per batch.

For the tiers and :class:`kvkeep.memory.base.References`. Callable from any thread. A long
prompt is pinned and unpinned as a whole, so the counts are changed here without a call per object;
:class:`~kvkeep.memory.base.MemoryObj` says what they mean.

References: an owner object for references to memory, so that no exception can leak one.

Use it from one thread at a time.

Element types by the names that layouts and headers carry. Pure functions.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.errors import LayoutError, OwnershipError
from kvkeep.layout import DTYPE_SIZES, MemoryFormat


@dataclass(frozen=True, slots=True)
class MemoryObjMetadata:
    """What a memory object holds.

    Attributes:
        shape: logical shape, in the order that ``fmt`` names.
        dtype: element type.
        fmt: arrangement of the bytes.
        size_bytes: number of bytes used, the product of shape and element size.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fmt: MemoryFormat
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What :meth:`MemoryAllocatorInterface.memcheck` proved.

    Attributes:
        capacity_bytes: size of the pool.
        used_bytes: bytes handed out, padding included.
        free_bytes: bytes that can be handed out; used + free = capacity.
        num_objects: living memory objects.
    """

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    num_objects: int


class MemoryOwner(Protocol):
    """What a memory object needs of whoever it belongs to."""

    count_lock: threading.RLock

    def note_release_locked(self, ended: MemoryObj | None) -> None:
        """See :meth:`MemoryAllocatorInterface.note_release_locked`."""


class MemoryObj:
    """A view of pool memory that is given back when nobody references or pins it.

    It starts with one reference, which belongs to whoever allocated it. There are as many as chunks
    in a pool, so it holds no view of its bytes: each use makes one. Its counts are changed here and
    in :mod:`kvkeep.memory.base` alone.

    Attributes:
        metadata: what it holds.
        offset: of its first byte, in its allocator's arena.
        owner: the allocator.
    """

    __slots__ = ("_is_over", "_memory", "_pins", "_refs", "metadata", "offset", "owner")

    def __init__(
        self,
        allocator: MemoryOwner,
        offset: int,
        memory: npt.NDArray[np.uint8],
        metadata: MemoryObjMetadata,
    ) -> None:
        """Called by allocators only.

        Args:
            allocator: where the memory goes back to.
            offset: position of the first byte in ``memory``.
            memory: all bytes that the offset counts in, one-dimensional.
            metadata: what the object holds.
        """
        self.owner = allocator
        self._memory: npt.NDArray[np.uint8] | None = memory  # None: it was given back
        self._refs = 1  # guarded by owner.count_lock
        self._pins = 0  # guarded by owner.count_lock
        self._is_over = False  # it went back to the allocator; guarded by owner.count_lock
        self.metadata = metadata
        self.offset = offset

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, one-dimensional.

        Raises:
            OwnershipError: the memory was given back.
        """
        memory = self._memory
        if memory is None:
            raise self.given_back()
        return memory[self.offset : self.offset + self.metadata.size_bytes]

    @property
    def tensor(self) -> torch.Tensor:
        """A view of ``metadata.shape`` and ``metadata.dtype``.

        KV_2LTD and KV_MLA_FMT are strided views, since memory is layer-major.
        """
        meta = self.metadata
        flat = torch.from_numpy(self.array).view(meta.dtype)
        if meta.fmt in (MemoryFormat.KV_2LTD, MemoryFormat.KV_MLA_FMT):
            first, layers, *rest = meta.shape
            return flat.view(layers, first, *rest).transpose(0, 1)
        return flat.view(meta.shape)

    @property
    def byte_array(self) -> memoryview:
        """The bytes as a writable memoryview, for files and sockets."""
        return self.array.data

    @property
    def count_lock(self) -> threading.RLock:
        """The lock of the allocator's counts; held for the methods whose names end in _locked."""
        return self.owner.count_lock

    @property
    def size_bytes(self) -> int:
        """Number of bytes used."""
        return self.metadata.size_bytes

    @property
    def is_alive(self) -> bool:
        """The memory was not given back yet."""
        return self._memory is not None

    @property
    def ref_count(self) -> int:
        """References held."""
        return self._refs

    @property
    def pin_count(self) -> int:
        """Pins held."""
        return self._pins

    @property
    def is_pinned(self) -> bool:
        """At least one pin is held."""
        return self._pins > 0

    def ref_count_up(self) -> None:
        """Take one more reference.

        Raises:
            OwnershipError: the memory was given back.
        """
        with self.owner.count_lock:
            self.ref_up_locked()

    def ref_count_down(self) -> None:
        """Give one reference back; the last one frees the memory unless it is pinned.

        Raises:
            OwnershipError: no reference is held.
        """
        with self.owner.count_lock:
            self.ref_down_locked()

    def pin(self) -> None:
        """Keep the memory from being evicted or reused.

        Raises:
            OwnershipError: the memory was given back.
        """
        with self.owner.count_lock:
            self.pin_locked()

    def unpin(self) -> None:
        """Give one pin back; frees the memory if no reference is held either.

        Raises:
            OwnershipError: no pin is held.
        """
        with self.owner.count_lock:
            self.unpin_locked()

    def invalidate_locked(self) -> None:
        """Make every later use an error, because the pool is closed. Called by allocators only."""
        self._memory = None

    def ref_up_locked(self) -> None:
        """Like :meth:`ref_count_up`, with the allocator's ``count_lock`` held."""
        if self._memory is None:
            raise self.given_back()
        self._refs += 1

    def ref_down_locked(self) -> None:
        """Like :meth:`ref_count_down`, with ``count_lock`` held."""
        if self._refs < 1:
            raise self.released_twice("reference to")
        self._refs -= 1
        self._note_release_locked()

    def pin_locked(self) -> None:
        """Like :meth:`pin`, with ``count_lock`` held."""
        if self._memory is None:
            raise self.given_back()
        self._pins += 1

    def unpin_locked(self) -> None:
        """Like :meth:`unpin`, with ``count_lock`` held."""
        if self._pins < 1:
            raise self.released_twice("pin on")
        self._pins -= 1
        self._note_release_locked()

    def _note_release_locked(self) -> None:
        if self._refs or self._pins:
            self.owner.note_release_locked(None)
        else:
            self.give_back_locked()

    def give_back_locked(self) -> None:
        """No reference or pin is left: give the memory back, once."""
        if self._is_over:
            self.owner.note_release_locked(None)
        else:
            self._is_over = True
            self._memory = None
            self.owner.note_release_locked(self)

    def released_twice(self, what: str) -> OwnershipError:
        """The error for a reference or pin that is given back and was not held."""
        return OwnershipError(f"{what} memory at {self.offset} was released twice")

    def given_back(self) -> OwnershipError:
        """The error for a use after the memory was given back."""
        return OwnershipError(f"memory at offset {self.offset} was used after it was given back")

    def __repr__(self) -> str:
        meta = self.metadata
        return (
            f"MemoryObj(offset={self.offset}, {meta.fmt}, shape={tuple(meta.shape)}, "
            f"refs={self._refs}, pins={self._pins})"
        )


class MemoryAllocatorInterface(ABC):
    """Hands out memory objects from one pool. All methods may be called from any thread.

    Subclasses set ``count_lock`` before they hand out the first object.
    """

    #: Guards the counts of this allocator's objects, and the allocator's own lists: counting,
    #: allocating and freeing take it and nothing else. Never held across a copy, I/O or a wait.
    count_lock: threading.RLock

    @abstractmethod
    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> MemoryObj | None:
        """One object with one reference, or None if there is no room now.

        Raises:
            ValueError: the shape has no or a negative size.
        """

    @abstractmethod
    def batched_allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
    ) -> list[MemoryObj] | None:
        """``batch_size`` objects of one shape, or None if there is no room for all of them."""

    @abstractmethod
    def note_release_locked(self, ended: MemoryObj | None) -> None:
        """References or pins were given back; called with ``count_lock`` held, within memory/.

        Takes the memory of ``ended`` back if it is given, and wakes :meth:`wait_for_release`.
        """

    @property
    @abstractmethod
    def release_count(self) -> int:
        """Number of releases so far. References or pins that go back in one batch may be one."""

    @abstractmethod
    def wait_for_release(self, seen: int, timeout_s: float) -> bool:
        """Wait until ``release_count`` differs from ``seen``; False if the time is over first.

        Read ``release_count`` before the allocation that failed, so that no release in between is
        missed. Closing the allocator wakes all who wait.
        """

    @abstractmethod
    def can_ever_fit(
        self, size_bytes: int, batch_size: int = 1, fmt: MemoryFormat = MemoryFormat.KV_2LTD
    ) -> bool:
        """An empty pool would have room for ``batch_size`` objects of ``size_bytes``.

        A closed pool never has.
        """

    @abstractmethod
    def room_for(self, size_bytes: int, fmt: MemoryFormat = MemoryFormat.KV_2LTD) -> int:
        """How many more objects of ``size_bytes`` fit now, in constant time.

        Exact for equal slots; elsewhere an upper bound, since free ranges may be too short.
        """

    @abstractmethod
    def usage(self) -> MemoryReport:
        """The figures of :meth:`memcheck` from counters, in constant time and without proof."""

    @abstractmethod
    def memcheck(self) -> MemoryReport:
        """Prove that used plus free is everything and that no two objects overlap.

        Raises:
            OwnershipError: they do not; the message says where.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the pool back to the system; a second call does nothing.

        Objects still alive become invalid: using them is an OwnershipError, giving their references
        and pins back is not. A tensor or array taken from one before stays readable until it is
        dropped.
        """


#: Counts as many objects of one owner as it can, whose lock is held; returns how many it did.
_Take = Callable[[Sequence[MemoryObj]], int]
#: Counts down each object of one owner, whose lock is held; the error of the first that was not up.
_Give = Callable[[Sequence[MemoryObj]], OwnershipError | None]


def batched_ref_count_up(objects: Sequence[MemoryObj]) -> None:
    """One more reference to each object, or to none if one was given back.

    Raises:
        OwnershipError: the memory of one was given back.
    """
    _take_all(objects, _ref_up_locked, _ref_down_locked)


def batched_pin(objects: Sequence[MemoryObj]) -> None:
    """One more pin on each object, or on none if one was given back.

    Raises:
        OwnershipError: the memory of one was given back.
    """
    _take_all(objects, _pin_locked, _unpin_locked)


def batched_ref_count_down(objects: Sequence[MemoryObj]) -> None:
    """Give one reference to each object back; goes on after an error.

    Raises:
        OwnershipError: no reference to one was held; the others were given back.
    """
    _give_all(objects, _ref_down_locked)


def batched_unpin(objects: Sequence[MemoryObj]) -> None:
    """Give one pin on each object back; goes on after an error.

    Raises:
        OwnershipError: one was not pinned; the others were unpinned.
    """
    _give_all(objects, _unpin_locked)


def _ref_up_locked(run: Sequence[MemoryObj]) -> int:
    for number, obj in enumerate(run):
        if obj._memory is None:
            return number
        obj._refs += 1
    return len(run)


def _pin_locked(run: Sequence[MemoryObj]) -> int:
    for number, obj in enumerate(run):
        if obj._memory is None:
            return number
        obj._pins += 1
    return len(run)


def _ref_down_locked(run: Sequence[MemoryObj]) -> OwnershipError | None:
    error: OwnershipError | None = None
    for obj in run:
        refs = obj._refs
        if refs < 1:
            error = error or obj.released_twice("reference to")
            continue
        obj._refs = refs - 1
        if refs == 1 and not obj._pins:
            obj.give_back_locked()
    return error


def _unpin_locked(run: Sequence[MemoryObj]) -> OwnershipError | None:
    error: OwnershipError | None = None
    for obj in run:
        pins = obj._pins
        if pins < 1:
            error = error or obj.released_twice("pin on")
            continue
        obj._pins = pins - 1
        if pins == 1 and not obj._refs:
            obj.give_back_locked()
    return error


_owner_of = attrgetter("owner")


def _runs(objects: Sequence[MemoryObj]) -> Iterator[tuple[MemoryOwner, Sequence[MemoryObj]]]:
    """The objects in order, in runs of one owner. Nearly always that is one run."""
    if len(set(map(_owner_of, objects))) == 1:
        yield objects[0].owner, objects
        return
    for owner, run in groupby(objects, key=_owner_of):
        yield owner, list(run)


def _take_all(objects: Sequence[MemoryObj], take: _Take, give: _Give) -> None:
    taken = 0
    for owner, run in _runs(objects):
        with owner.count_lock:
            number = take(run)
        taken += number
        if number < len(run):
            _give_all(objects[:taken], give)
            raise run[number].given_back()


def _give_all(objects: Sequence[MemoryObj], give: _Give) -> None:
    first_error: OwnershipError | None = None
    for owner, run in _runs(objects):
        with owner.count_lock:
            error = give(run)
            owner.note_release_locked(None)
        first_error = first_error or error
    if first_error is not None:
        raise first_error


class References:
    """Owns one reference to each of some memory objects and gives them back once.

    >>> with References(backend.batched_get_blocking(keys)) as held:
    ...     copy(held.objects)
    """

    def __init__(self, objects: Iterable[MemoryObj | None] = ()) -> None:
        """Become the owner of references that the caller holds. None entries are skipped."""
        self.objects: list[MemoryObj] = [obj for obj in objects if obj is not None]

    def adopt(self, objects: Iterable[MemoryObj | None]) -> None:
        """Become the owner of more references."""
        self.objects.extend(obj for obj in objects if obj is not None)

    def detach(self) -> list[MemoryObj]:
        """Hand all references to the caller, who must give them back."""
        objects, self.objects = self.objects, []
        return objects

    def release(self) -> None:
        """Give all references back; a second call does nothing.

        Raises:
            OwnershipError: somebody else gave one of them back before; all others were given back.
        """
        batched_ref_count_down(self.detach())

    def __enter__(self) -> References:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type, without the library's prefix: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The element type of a name that :data:`kvkeep.layout.DTYPE_SIZES` knows.

    Raises:
        LayoutError: it does not know the name.
    """
    if name not in DTYPE_SIZES:
        raise LayoutError(f"unknown KV dtype {name!r}; known: {', '.join(DTYPE_SIZES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
