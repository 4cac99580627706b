"""Counting many memory objects at once: their allocator's lock is taken once per batch.

For the tiers and :class:`kvkeep.memory.ownership.References`. Callable from any thread. A long
prompt is pinned and unpinned as a whole, so the counts are changed here without a call per object;
:class:`~kvkeep.memory.base.MemoryObj` says what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from kvkeep.errors import OwnershipError
from kvkeep.memory.base import MemoryObj, MemoryOwner

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
