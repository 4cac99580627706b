"""What a storage backend (a tier) promises. Start here to write one.

    StorageBackendInterface            contains, put, get, remove, pins, health
    ├── AllocatorBackendInterface      ... and memory: LocalCPUBackend
    └── StoragePluginInterface         ... built from the user's settings

Rules for all: every method may be called from any thread; answers to a batch stand position by
position; a miss is a value, an exception is a fault; objects that are returned carry one reference
for the caller; objects that are handed in still belong to the caller, a backend that keeps one
takes its own reference. The contract tests in ``kvkeep.testing`` check every one of these
sentences.

Lease: pins on chunks, held by one request until it gives them back or its deadline passes.

A lease is the promise behind an answered lookup (spec 1.16). It holds the pinned objects
themselves, not their keys, so giving it back can never unpin somebody else's chunk. Callable from
any thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

import torch

from kvkeep.errors import BackendError
from kvkeep.hashing import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj, MemoryReport, batched_pin, batched_unpin

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


class PutOutcome(StrEnum):
    """What became of one chunk that was put."""

    STORED = "stored"
    """It is in, or on its way in."""
    PRESENT = "present"
    """It was there already; nothing was done."""
    NO_ROOM = "no_room"
    """There was no room and nothing could be evicted for it."""
    DROPPED = "dropped"
    """It was shed under load (a full queue), or the backend is closing."""


@dataclass(frozen=True, slots=True)
class BackendHealth:
    """A backend's own opinion of itself.

    Attributes:
        healthy: it can serve now.
        detail: one line for people: why not, or what it holds.
    """

    healthy: bool
    detail: str = ""


class StorageBackendInterface(ABC):
    """One tier."""

    #: Name of the tier, unique in a StorageManager; the ``location`` of its chunks.
    name: str

    @abstractmethod
    def contains(self, key: ChunkKey, *, pin: Lease | None = None) -> bool:
        """The whole chunk can be read now.

        Args:
            key: the chunk.
            pin: if given, a chunk that is found is pinned and the pin belongs to this lease.
        """

    def batched_contains(self, keys: Sequence[ChunkKey], *, pin: Lease | None = None) -> int:
        """Length of the run of present chunks at the start of ``keys``; each is pinned if asked."""
        for index, key in enumerate(keys):
            if not self.contains(key, pin=pin):
                return index
        return len(keys)

    def batched_async_contains(self, keys: Sequence[ChunkKey]) -> Future[int]:
        """Length of the run of present chunks at the start of ``keys``, as a future.

        Nothing is pinned. A tier in memory answers at once, within the call; one that would have to
        wait for its medium overrides this, so that neither its caller nor an I/O thread waits.
        """
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self.batched_contains(keys))
        except Exception as error:  # noqa: BLE001  top of this task: it travels in the future
            future.set_exception(error)
        return future

    def known_run(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the run of chunks at the start of ``keys`` that are known to be there.

        Asked by the engine's thread before it stores, so that it copies nothing twice. Returns at
        once: a tier that would have to ask a slow medium, and remembers nothing, knows nothing.
        """
        return 0

    def make_way(self) -> AbstractContextManager[None]:
        """While what is returned is entered, hold back what is stored in the background.

        The engine's thread is copying. A tier that stores nothing in the background does nothing.
        """
        return nullcontext()

    @abstractmethod
    def batched_submit_put_task(
        self,
        keys: Sequence[ChunkKey],
        objs: Sequence[MemoryObj],
        *,
        on_complete: Callable[[ChunkKey], None] | None = None,
    ) -> list[PutOutcome]:
        """Take chunks in; returns without waiting for a slow medium.

        Args:
            keys: the chunks.
            objs: their bytes, in the same order; they belong to this backend's allocator backend.
            on_complete: called without a lock held, once per chunk that became readable.

        Raises:
            BackendError: the backend failed.
        """

    @abstractmethod
    def batched_get_blocking(self, keys: Sequence[ChunkKey]) -> list[MemoryObj | None]:
        """Chunks position by position, each with a reference for the caller, None for a miss.

        Raises:
            BackendError: the backend failed as a whole; nothing is held then.
        """

    def get_blocking(self, key: ChunkKey) -> MemoryObj | None:
        """One chunk; see :meth:`batched_get_blocking`."""
        return self.batched_get_blocking([key])[0]

    def batched_get_non_blocking(self, keys: Sequence[ChunkKey]) -> Future[list[MemoryObj | None]]:
        """The same as a future. A tier in memory answers at once."""
        future: Future[list[MemoryObj | None]] = Future()
        try:
            future.set_result(self.batched_get_blocking(keys))
        except Exception as error:  # noqa: BLE001  top of this task: it travels in the future
            future.set_exception(error)
        return future

    @abstractmethod
    def remove(self, key: ChunkKey) -> bool:
        """Make the chunk invisible at once; its memory goes when the last reader is done.

        Returns:
            False if it was not there.
        """

    def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove several; returns how many were there."""
        return sum(self.remove(key) for key in keys)

    @abstractmethod
    def batched_unpin(self, entries: Sequence[tuple[ChunkKey, MemoryObj]]) -> None:
        """Give pins back that :meth:`contains` took, in the order in which they were taken.

        Called by :class:`Lease` alone. The backend notes the use of the chunks in reverse, so that
        a prefix ends up more recent than its suffix (spec 5.5).
        """

    def touch_cache(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027 - not every tier evicts
        """Note one use of each chunk, the last one first, so that a prefix outlives its suffix.

        A tier that keeps no order of use does nothing. Keys that are not there are skipped.
        """

    def note_order(self, keys: Sequence[ChunkKey]) -> None:  # noqa: B027 - not every tier evicts
        """Let these chunks of one prompt, in order, be evicted from the last one on.

        Called when a prompt was stored or loaded, after its chunks came in or were used, perhaps in
        several parts. It is no use. Keys that are not there are skipped; a tier that keeps no order
        does nothing.
        """

    @abstractmethod
    def clear(self) -> int:
        """Remove everything; returns how many chunks there were."""

    @abstractmethod
    def keys(self) -> list[ChunkKey]:
        """Every readable chunk, in no particular order. For inspection and tests."""

    @abstractmethod
    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """The backend whose memory this one reads from and fills."""

    def health(self) -> BackendHealth:
        """Whether it can serve now; quick, called often."""
        return BackendHealth(True)

    @abstractmethod
    def close(self) -> None:
        """Finish or drop what is queued, within a deadline; a second call does nothing."""


class AllocatorBackendInterface(StorageBackendInterface):
    """A tier that also hands out memory."""

    @abstractmethod
    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """One object; see :meth:`batched_allocate`."""

    @abstractmethod
    def batched_allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        eviction: bool = True,
        busy_loop: bool = True,
        protect: Collection[ChunkKey] = (),
    ) -> list[MemoryObj] | None:
        """``batch_size`` objects with one reference each, all or none.

        As few chunks as possible are evicted, and none in vain: if evicting all that may go would
        not make enough room, nothing is evicted. No part of a batch is held while waiting for the
        rest.

        Args:
            shape: of one object.
            dtype: element type.
            batch_size: how many.
            fmt: arrangement.
            eviction: chunks may be evicted to make room.
            busy_loop: wait, up to the backend's deadline, for memory to be released when there is
                nothing to evict (loads); False returns None at once (stores).
            protect: chunks that must not be evicted for it, such as the prefix of what is stored.
        """

    @abstractmethod
    def memcheck(self) -> MemoryReport:
        """See :meth:`kvkeep.memory.base.MemoryAllocatorInterface.memcheck`."""


class StoragePluginInterface(StorageBackendInterface):
    """A user's own backend, built by name from the settings."""

    @classmethod
    @abstractmethod
    def from_settings(
        cls, settings: Mapping[str, object], allocator_backend: AllocatorBackendInterface
    ) -> StoragePluginInterface:
        """Build it.

        Args:
            settings: the plugin's own part of the settings, as it was written.
            allocator_backend: the backend whose memory it reads from and fills.

        Raises:
            ConfigError: a setting is wrong.
        """


def pin_loaded(
    backend: StorageBackendInterface,
    keys: Sequence[ChunkKey],
    objs: Sequence[MemoryObj],
    lease: Lease,
    *,
    allocator_backend: AllocatorBackendInterface,
    fault: Callable[[str, str], object],
) -> int:
    """Give pins on loaded objects to a lease, and the objects to the CPU tier.

    Args:
        backend: the tier that the pins are given back to.
        keys: the chunks.
        objs: their verified bytes, position by position; the references stay the caller's.
        lease: becomes the owner of the pins.
        allocator_backend: the CPU tier.
        fault: counts a failure of the CPU tier by operation and cause.

    Returns:
        How many are pinned: all, or none if the lease has ended.
    """
    try:
        allocator_backend.batched_submit_put_task(keys, objs)
    except BackendError:
        fault("promote", "allocator_backend")
    batched_pin(objs)
    if keys and not lease.add_all(backend, list(zip(keys, objs, strict=True))):
        batched_unpin(objs)
        return 0
    return len(keys)
