"""Memory that Mooncake's client reads and writes by address: headers, and views of the pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvkeep.backends.remote.base import HEADER_BYTES
from kvkeep.codec.frame import Buffer


def address_of(view: Buffer) -> int:
    """Where the bytes of a view begin in this process."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class HeaderSlots:
    """Room for headers, registered once; a call takes as many as it has values."""

    def __init__(self, count: int) -> None:
        """Make room for ``count`` headers."""
        self.memory = np.zeros((count, HEADER_BYTES), np.uint8)
        self._lock = threading.Lock()
        self._free = list(range(count))  # guarded by _lock

    def take(self, count: int) -> Slots:
        """Room for so many headers.

        Raises:
            ConnectionError: calls that do not end have all of it.
        """
        with self._lock:
            if len(self._free) < count:
                raise ConnectionError("calls that do not end hold all memory for headers")
            taken = [self._free.pop() for _ in range(count)]
        return Slots(self, taken)

    def give_back(self, taken: Sequence[int]) -> None:
        """Take slots back."""
        with self._lock:
            self._free += taken


class Slots:
    """Slots of one call. Leaving the ``with`` block gives them back, unless they are kept."""

    def __init__(self, owner: HeaderSlots, taken: Sequence[int]) -> None:
        """Own these slots."""
        self._owner = owner
        self._taken = taken
        self._is_kept = False

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_kept:
            self.give_back()

    def keep(self) -> None:
        """From now on somebody else calls :meth:`give_back`, once."""
        self._is_kept = True

    def give_back(self) -> None:
        """Nobody reads or writes them any more."""
        self._owner.give_back(self._taken)

    def address(self, index: int) -> int:
        """Of the header at this position."""
        return address_of(self._owner.memory[self._taken[index]].data)

    def write(self, index: int, header: bytes) -> None:
        """Put a header there."""
        self._owner.memory[self._taken[index]] = np.frombuffer(header, np.uint8)

    def read(self, index: int) -> bytes:
        """The header that is there."""
        return bytes(self._owner.memory[self._taken[index]])
