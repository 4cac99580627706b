"""DictBackend: the simplest tier that keeps the contract. Read it before you write your own.

It copies bytes into a dict, and on a get into fresh pool memory, as a slow medium would. Callable
from any thread; one lock guards the dict and is not held while bytes are copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    BackendHealth,
    Lease,
    PutOutcome,
    StorageBackendInterface,
)
from kvkeep.hashing import ChunkKey
from kvkeep.memory.base import MemoryObj, MemoryObjMetadata, References, batched_unpin


class DictBackend(StorageBackendInterface):
    """Chunks as bytes in a dict."""

    def __init__(
        self,
        allocator_backend: AllocatorBackendInterface,
        *,
        name: str = "DictBackend",
        capacity_bytes: int | None = None,
    ) -> None:
        """Start empty.

        Args:
            allocator_backend: where objects that are returned are allocated.
            name: name of the tier.
            capacity_bytes: most bytes to keep; what does not fit has NO_ROOM. None is no limit.
        """
        self.name = name
        self._allocator_backend = allocator_backend
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._chunks: dict[ChunkKey, tuple[MemoryObjMetadata, bytes]] = {}  # guarded by _lock
        self._used_bytes = 0  # guarded by _lock
        self._closed = False  # guarded by _lock

    def contains(self, key: ChunkKey, *, pin: Lease | None = None) -> bool:
        """The chunk is in the dict; see the interface.

        A pin is a pin on a copy in pool memory. A chunk for which there is no room there cannot be
        promised and counts as absent.
        """
        if pin is None:
            with self._lock:
                return key in self._chunks
        with References(self._load([key], busy_loop=False)) as held:
            for obj in held.objects:
                obj.pin()
                if pin.add(self, key, obj):
                    return True
                obj.unpin()
        return False

    def known_run(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the run of chunks in the dict: to look is no wait."""
        return self.batched_contains(keys)

    def batched_submit_put_task(
        self,
        keys: Sequence[ChunkKey],
        objs: Sequence[MemoryObj],
        *,
        on_complete: Callable[[ChunkKey], None] | None = None,
    ) -> list[PutOutcome]:
        """Copy the bytes; see the interface."""
        if len(keys) != len(objs):
            raise ValueError(f"{len(keys)} keys for {len(objs)} objects")
        outcomes = [self._put(key, obj) for key, obj in zip(keys, objs, strict=True)]
        if on_complete is not None:
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome is PutOutcome.STORED:
                    on_complete(key)
        return outcomes

    def _put(self, key: ChunkKey, obj: MemoryObj) -> PutOutcome:
        if self.contains(key):
            return PutOutcome.PRESENT
        data = obj.array.tobytes()
        with self._lock:
            if self._closed:
                return PutOutcome.DROPPED
            if key in self._chunks:
                return PutOutcome.PRESENT
            used_bytes = self._used_bytes + len(data)
            if self._capacity_bytes is not None and used_bytes > self._capacity_bytes:
                return PutOutcome.NO_ROOM
            self._chunks[key] = (obj.metadata, data)
            self._used_bytes = used_bytes
            return PutOutcome.STORED

    def batched_get_blocking(self, keys: Sequence[ChunkKey]) -> list[MemoryObj | None]:
        """Copies of the chunks; see the interface."""
        return self._load(keys, busy_loop=True)

    def _load(self, keys: Sequence[ChunkKey], *, busy_loop: bool) -> list[MemoryObj | None]:
        """Copy chunks into pool memory, for which only the first allocation may wait.

        Room is asked for once per shape, for all chunks of it or none. To wait while other memory
        is held could be for ever, so what finds no room after that is a miss.
        """
        with self._lock:
            chunks = [self._chunks.get(key) for key in keys]
        indexes: dict[MemoryObjMetadata, list[int]] = {}
        for index, chunk in enumerate(chunks):
            if chunk is not None:
                indexes.setdefault(chunk[0], []).append(index)
        found: list[MemoryObj | None] = [None] * len(keys)
        with References() as held:
            for meta, places in indexes.items():
                objs = self._allocator_backend.batched_allocate(
                    meta.shape, meta.dtype, len(places), meta.fmt, busy_loop=busy_loop
                )
                busy_loop = False
                held.adopt(objs or [])
                for index, obj in zip(places, objs or [], strict=False):
                    chunk = chunks[index]
                    assert chunk is not None
                    np.copyto(obj.array, np.frombuffer(chunk[1], np.uint8))
                    found[index] = obj
            held.detach()
        return found

    def remove(self, key: ChunkKey) -> bool:
        """Forget the chunk; copies that were handed out stay valid."""
        with self._lock:
            chunk = self._chunks.pop(key, None)
            if chunk is None:
                return False
            self._used_bytes -= len(chunk[1])
            return True

    def batched_unpin(self, entries: Sequence[tuple[ChunkKey, MemoryObj]]) -> None:
        """Let the pinned copies go."""
        batched_unpin([obj for _, obj in entries])

    def clear(self) -> int:
        """Forget everything; returns how many chunks there were."""
        with self._lock:
            count = len(self._chunks)
            self._chunks.clear()
            self._used_bytes = 0
            return count

    def keys(self) -> list[ChunkKey]:
        """Every chunk."""
        with self._lock:
            return list(self._chunks)

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """The backend it was given."""
        return self._allocator_backend

    def health(self) -> BackendHealth:
        """Healthy until it is closed."""
        with self._lock:
            if self._closed:
                return BackendHealth(False, "closed")
            return BackendHealth(True, f"{len(self._chunks)} chunks, {self._used_bytes} bytes")

    def close(self) -> None:
        """Forget everything and take nothing more in."""
        with self._lock:
            self._closed = True
        self.clear()
