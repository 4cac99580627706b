"""Lease: pins on chunks, held by one request until it gives them back or its deadline passes.

A lease is the promise behind an answered lookup (spec 1.16). It holds the pinned objects
themselves, not their keys, so giving it back can never unpin somebody else's chunk. Callable from
any thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.batches import batched_unpin

if TYPE_CHECKING:
    from kvkeep.backends.base import StorageBackendInterface

_log = logging.getLogger(__name__)


class Lease:
    """Pinned chunks with an owner and a deadline. Giving it back twice does nothing.

    Attributes:
        owner: the request it belongs to.
        deadline: value of ``time.monotonic()`` after which it may be taken back.
        opened: value of ``time.monotonic()`` when it was opened, at the start of its lookup; what a
            lookup may take of time counts from here.
        when_released: called once when the lease has been given back, in whatever thread that is,
            perhaps within the garbage collector: it must not wait.
    """

    def __init__(
        self,
        owner: str,
        deadline: float,
        *,
        is_bypassed: Callable[[str], bool] | None = None,
    ) -> None:
        """An empty lease.

        Args:
            owner: the request it belongs to.
            deadline: value of ``time.monotonic()`` after which it may be taken back.
            is_bypassed: whether the backend of a name is left out now; its pins are then given back
                without calling it. None: none ever is.
        """
        self._is_bypassed = is_bypassed
        self.owner = owner
        self.deadline = deadline
        self.opened = time.monotonic()
        self.when_released: Callable[[], object] | None = None
        self._lock = threading.RLock()
        self._pins: dict[StorageBackendInterface, list[tuple[ChunkKey, MemoryObj]]] = {}  # by _lock
        self._by_key: dict[ChunkKey, MemoryObj] = {}  # guarded by _lock
        self._released = False  # guarded by _lock

    def add(self, backend: StorageBackendInterface, key: ChunkKey, obj: MemoryObj) -> bool:
        """Become the owner of a pin on ``obj`` that ``backend`` has just taken.

        Returns:
            False if the lease was given back already; the caller then keeps the pin.
        """
        return self.add_all(backend, [(key, obj)])

    def add_all(
        self, backend: StorageBackendInterface, entries: Sequence[tuple[ChunkKey, MemoryObj]]
    ) -> bool:
        """Become the owner of several pins at once, in the order in which they were taken.

        Returns:
            False if the lease was given back already; the caller then keeps all of them.
        """
        with self._lock:
            if self._released:
                return False
            self._pins.setdefault(backend, []).extend(entries)
            self._by_key.update(entries)
            return True

    def get(self, key: ChunkKey) -> MemoryObj | None:
        """The pinned object of ``key`` with a new reference for the caller, or None."""
        with self._lock:
            obj = self._by_key.get(key)
            if obj is not None:
                obj.ref_count_up()
            return obj

    def __len__(self) -> int:
        """Number of pins held."""
        with self._lock:
            return sum(map(len, self._pins.values()))

    def expired(self, now: float) -> bool:
        """The deadline has passed at ``now`` (``time.monotonic()``)."""
        return now >= self.deadline

    def keep_first(self, num_chunks: int) -> None:
        """Give back the pins of all chunks but the first ones that were added; it goes on."""
        dropped: dict[StorageBackendInterface, list[tuple[ChunkKey, MemoryObj]]] = {}
        with self._lock:
            kept = dict(itertools.islice(self._by_key.items(), num_chunks))
            for backend, entries in self._pins.items():
                dropped[backend] = [entry for entry in entries if entry[0] not in kept]
                self._pins[backend] = [entry for entry in entries if entry[0] in kept]
            self._by_key = kept
        self._give_back(dropped)

    def release(self) -> None:
        """Unpin everything and let the backends note what was used (``touch_cache``).

        A backend that fails at it is logged and does not keep the others' pins. One that is left
        out is not called: the memory is unpinned, and its order of use stays as it was.
        """
        with self._lock:
            pins, self._pins = self._pins, {}
            self._by_key = {}
            self._released = True
            when_released, self.when_released = self.when_released, None
        self._give_back(pins)
        if when_released is not None:
            when_released()

    def _give_back(
        self, pins: Mapping[StorageBackendInterface, list[tuple[ChunkKey, MemoryObj]]]
    ) -> None:
        for backend, entries in pins.items():
            if not entries:
                continue
            if self._is_bypassed is not None and self._is_bypassed(backend.name):
                batched_unpin([obj for _, obj in entries])
                continue
            try:
                backend.batched_unpin(entries)
            except Exception as error:  # noqa: BLE001 - here other people's code begins
                _log.warning("lease of %s: %s failed: %s", self.owner, backend.name, error)
