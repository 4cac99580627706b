"""Counting many memory objects at once: their allocator's lock is taken once per batch.

For the tiers and :class:`kvkeep.memory.ownership.References`. Callable from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from kvkeep.errors import OwnershipError
from kvkeep.memory.base import MemoryObj


def batched_ref_count_up(objects: Sequence[MemoryObj]) -> None:
    """One more reference to each object, or to none if one was given back.

    Raises:
        OwnershipError: the memory of one was given back.
    """
    _take_all(objects, MemoryObj.ref_up_locked, MemoryObj.ref_down_locked)


def batched_pin(objects: Sequence[MemoryObj]) -> None:
    """One more pin on each object, or on none if one was given back.

    Raises:
        OwnershipError: the memory of one was given back.
    """
    _take_all(objects, MemoryObj.pin_locked, MemoryObj.unpin_locked)


def batched_ref_count_down(objects: Sequence[MemoryObj]) -> None:
    """Give one reference to each object back; goes on after an error.

    Raises:
        OwnershipError: no reference to one was held; the others were given back.
    """
    _give_all(objects, MemoryObj.ref_down_locked)


def batched_unpin(objects: Sequence[MemoryObj]) -> None:
    """Give one pin on each object back; goes on after an error.

    Raises:
        OwnershipError: one was not pinned; the others were unpinned.
    """
    _give_all(objects, MemoryObj.unpin_locked)


def _runs(objects: Sequence[MemoryObj]) -> Iterator[tuple[threading.RLock, Sequence[MemoryObj]]]:
    """The objects in order, in runs of one owner, with its lock. Nearly always that is one run."""
    owners = [obj.owner for obj in objects]
    start = 0
    for index in range(1, len(owners) + 1):
        if index == len(owners) or owners[index] is not owners[start]:
            yield owners[start].count_lock, objects[start:index]
            start = index


def _take_all(
    objects: Sequence[MemoryObj],
    take: Callable[[MemoryObj], None],
    undo: Callable[[MemoryObj], None],
) -> None:
    taken: list[MemoryObj] = []
    try:
        for lock, run in _runs(objects):
            with lock:
                for obj in run:
                    take(obj)
                    taken.append(obj)
    except OwnershipError:
        _give_all(taken, undo)
        raise


def _give_all(objects: Sequence[MemoryObj], give: Callable[[MemoryObj], None]) -> None:
    first_error: OwnershipError | None = None
    for lock, run in _runs(objects):
        with lock:
            for obj in run:
                try:
                    give(obj)
                except OwnershipError as error:
                    first_error = first_error or error
    if first_error is not None:
        raise first_error
