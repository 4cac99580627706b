"""What a storage backend (a tier) promises. Start here to write one.

    StorageBackendInterface            contains, put, get, remove, pins, health
    ├── AllocatorBackendInterface      ... and memory: LocalCPUBackend
    └── StoragePluginInterface         ... built from the user's settings

Rules for all: every method may be called from any thread; answers to a batch stand position by
position; a miss is a value, an exception is a fault; objects that are returned carry one reference
for the caller; objects that are handed in still belong to the caller, a backend that keeps one
takes its own reference. The contract tests in ``kvkeep.testing`` check every one of these
sentences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

import torch

from kvkeep.backends.lease import Lease
from kvkeep.keys import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj, MemoryReport


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
