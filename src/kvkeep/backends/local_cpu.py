"""LocalCPUBackend (L1): the pool of CPU memory and the cache of the chunks that live in it.

Callable from any thread. One lock guards index, policy and evictions together; nothing is copied,
waited for or called back with it held. A chunk is one memory object with all its layers, so it is
visible, pinned and evicted as one.

A dropped generator may give its lease back from within the garbage collector, that is in the middle
of any call here. So :meth:`batched_unpin` never waits for the lock: it queues what was used, and
whoever has the lock next notes it before the policy is asked for anything.

Who holds what: the index holds one reference to each chunk. A chunk may be evicted when that is the
only reference and nobody pins it. A chunk that is removed on purpose leaves the index at once, and
its memory goes back when the last reader is done.

make_room: allocate a batch, evicting as little as needed, and nothing in vain.

Called by a tier with its lock held. The tier says what may go, in which order, and how to let it
go; allocating and counting stand here. Nothing is taken before there is room for all of it, so two
who want more than there is never hold half each, nor wake each other by giving it back.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from kvkeep.backends.base import AllocatorBackendInterface, BackendHealth, Lease, PutOutcome
from kvkeep.hashing import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import (
    MemoryAllocatorInterface,
    MemoryObj,
    MemoryReport,
    batched_pin,
    batched_ref_count_down,
    batched_ref_count_up,
    batched_unpin,
)
from kvkeep.metrics import Metrics
from kvkeep.policy.base import CachePolicy


@dataclass(frozen=True, slots=True)
class Room:
    """A batch of equal objects that is wanted.

    Attributes:
        shape: of one object.
        dtype: element type.
        batch_size: how many.
        fmt: arrangement.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_size: int
    fmt: MemoryFormat

    @property
    def object_bytes(self) -> int:
        """Bytes of one object."""
        return math.prod(self.shape) * self.dtype.itemsize

    def missing_in(self, allocator: MemoryAllocatorInterface) -> int:
        """How many of the objects have no room yet."""
        return self.batch_size - allocator.room_for(self.object_bytes, self.fmt)

    def take_from(self, allocator: MemoryAllocatorInterface) -> list[MemoryObj] | None:
        """All objects, or None if there is no room for all of them."""
        return allocator.batched_allocate(self.shape, self.dtype, self.batch_size, self.fmt)


def make_room(
    room: Room,
    allocator: MemoryAllocatorInterface,
    candidates: Callable[[int], list[ChunkKey]],
    evict: Callable[[ChunkKey], None],
    size_of: Callable[[ChunkKey], int],
) -> list[MemoryObj] | None:
    """Allocate ``room``, evicting one chunk after the other until there is enough.

    Where all objects are about equally large, nothing is evicted unless that makes enough room. A
    pool of very different sizes can turn out too fragmented after evictions.

    Args:
        room: what is wanted.
        allocator: the pool.
        candidates: up to that many chunks that may go, best first.
        evict: lets one go; its memory is free afterwards.
        size_of: bytes of a chunk.
    """
    while True:
        missing = room.missing_in(allocator)
        if missing <= 0:
            objs = room.take_from(allocator)
            if objs is not None:
                return objs
            missing = 1  # the free ranges are too short
        chosen = candidates(missing)
        gained_bytes = sum(map(size_of, chosen))
        if not chosen or (len(chosen) < missing and gained_bytes < missing * room.object_bytes):
            return None
        for key in chosen:
            evict(key)
            if room.missing_in(allocator) <= 0:
                break


#: Events that ``notify`` is told about.
ADMIT, EVICT = "ADMIT", "EVICT"


class LocalCPUBackend(AllocatorBackendInterface):
    """The first tier, and the memory of all others."""

    def __init__(
        self,
        allocator: MemoryAllocatorInterface,
        policy: CachePolicy[MemoryObj],
        *,
        metrics: Metrics,
        alloc_timeout_s: float = 5.0,
        use_hot_cache: bool = True,
        before_evict: Callable[[], object] | None = None,
        notify: Callable[[str, ChunkKey], None] | None = None,
    ) -> None:
        """Own a pool.

        Args:
            allocator: the pool; :meth:`close` closes it.
            policy: the order of eviction; used by this backend alone from now on.
            metrics: where evictions are counted.
            alloc_timeout_s: seconds that an allocation with ``busy_loop`` waits at most.
            use_hot_cache: keep chunks; False makes it a pool of buffers only, and every put is
                DROPPED.
            before_evict: called without a lock held when there is no room; gives memory back that
                nobody needs any more (expired leases) and returns a true value if it gave any.
            notify: called without a lock held with ``"ADMIT"`` or ``"EVICT"`` and the key of each
                chunk that came or went.
        """
        self.name = "LocalCPUBackend"
        self.allocator = allocator
        self.before_evict = before_evict
        self.hot_cache = policy.init_mutable_mapping()  # guarded by _lock
        self._policy = policy  # guarded by _lock
        self._metrics = metrics
        self._alloc_timeout_s = alloc_timeout_s
        self._use_hot_cache = use_hot_cache
        self._notify = notify
        self._lock = threading.Lock()
        self._closed = False  # guarded by _lock
        self._used: deque[Sequence[tuple[ChunkKey, MemoryObj]]] = deque()  # unpinned, not yet noted
        metrics.watch_chunks(self.name, self.__len__)
        metrics.watch_pool(
            lambda: self.allocator.usage().used_bytes, lambda: self.allocator.usage().free_bytes
        )

    def __len__(self) -> int:
        """Chunks in the index."""
        return len(self.hot_cache)

    def contains(self, key: ChunkKey, *, pin: Lease | None = None) -> bool:
        """The chunk is in the index; pinned if asked. See the interface."""
        return self.batched_contains((key,), pin=pin) == 1

    def known_run(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the run of present chunks; the index knows all."""
        return self.batched_contains(keys)

    def batched_contains(self, keys: Sequence[ChunkKey], *, pin: Lease | None = None) -> int:
        """Length of the run of present chunks; see the interface.

        With a lease that was given back already the answer is 0, since nothing can be promised.
        """
        with self._lock:
            hot_cache = self.hot_cache
            found = len(list(takewhile(hot_cache.__contains__, keys)))
            if found < len(keys):
                self._policy.note_chain(keys[max(found - 1, 0) :])
            if pin is None:
                return found
            pinned = list(map(hot_cache.__getitem__, keys[:found]))
            batched_pin(pinned)
        entries = list(zip(keys, pinned, strict=False))
        if entries and not pin.add_all(self, entries):
            batched_unpin(pinned)
            return 0
        return len(entries)

    def batched_submit_put_task(
        self,
        keys: Sequence[ChunkKey],
        objs: Sequence[MemoryObj],
        *,
        on_complete: Callable[[ChunkKey], None] | None = None,
    ) -> list[PutOutcome]:
        """Take chunks into the index, at once; see the interface.

        The last chunk of the batch comes in first, so that a suffix is evicted before its prefix.
        """
        if len(keys) != len(objs):
            raise ValueError(f"{len(keys)} keys for {len(objs)} objects")
        with self._lock:
            if self._closed or not self._use_hot_cache:
                return [PutOutcome.DROPPED] * len(keys)
            self._note_used_locked()
            new: dict[ChunkKey, MemoryObj] = {}
            outcomes: list[PutOutcome] = []
            for key, obj in zip(keys, objs, strict=True):
                is_new = key not in self.hot_cache and key not in new
                outcomes.append(PutOutcome.STORED if is_new else PutOutcome.PRESENT)
                if is_new:
                    new[key] = obj
            batched_ref_count_up(list(new.values()))
            for key, obj in reversed(new.items()):
                self.hot_cache[key] = obj
                self._policy.update_on_put(key)
        self._tell(ADMIT, new)
        if on_complete is not None:
            for key in new:
                on_complete(key)
        return outcomes

    def batched_get_blocking(self, keys: Sequence[ChunkKey]) -> list[MemoryObj | None]:
        """References to the chunks in the index; a get is a use. See the interface."""
        with self._lock:
            objs = [self.hot_cache.get(key) for key in keys]
            batched_ref_count_up([obj for obj in objs if obj is not None])
            self._touch_locked(keys)
        return objs

    def touch_cache(self, keys: Sequence[ChunkKey]) -> None:
        """Note one use of each chunk that is present, the last one first."""
        with self._lock:
            self._touch_locked(keys)

    def note_order(self, keys: Sequence[ChunkKey]) -> None:
        """Let these chunks of one prompt be evicted from the last one on."""
        with self._lock:
            self._note_used_locked()
            self._policy.note_order(keys, self.hot_cache)

    def _touch_locked(self, keys: Sequence[ChunkKey]) -> None:
        self._note_used_locked()
        hot_cache = self.hot_cache
        here = [key for key in reversed(keys) if key in hot_cache]
        self._policy.update_on_hits(here, hot_cache)

    def remove(self, key: ChunkKey) -> bool:
        """Take one chunk out of the index; see the interface."""
        return self.batched_remove((key,)) == 1

    def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """Take several chunks out of the index; returns how many were there."""
        with self._lock:
            removed = {key: self._take_out_locked(key) for key in keys if key in self.hot_cache}
        batched_ref_count_down(list(removed.values()))
        self._tell(EVICT, removed)
        return len(removed)

    def _take_out_locked(self, key: ChunkKey) -> MemoryObj:
        """Take a chunk out of the index; the caller becomes the owner of its reference."""
        obj = self.hot_cache.pop(key)
        self._policy.update_on_force_evict(key)
        return obj

    def batched_unpin(self, entries: Sequence[tuple[ChunkKey, MemoryObj]]) -> None:
        """Give pins back and note the use of the chunks that are still here; see the interface."""
        self._used.append(entries)
        batched_unpin([obj for _, obj in entries])
        if self._lock.acquire(blocking=False):
            try:
                self._note_used_locked()
            finally:
                self._lock.release()

    def _note_used_locked(self) -> None:
        """Note the use of what was unpinned, in the order of the leases' ends."""
        hot_cache = self.hot_cache
        while self._used:
            used = reversed(self._used.popleft())
            here = [key for key, obj in used if hot_cache.get(key) is obj]
            self._policy.update_on_hits(here, hot_cache)

    def clear(self) -> int:
        """Take everything out of the index; returns how many chunks there were."""
        with self._lock:
            removed = {key: self._take_out_locked(key) for key in list(self.hot_cache)}
        batched_ref_count_down(list(removed.values()))
        self._tell(EVICT, removed)
        return len(removed)

    def keys(self) -> list[ChunkKey]:
        """Every chunk in the index."""
        with self._lock:
            return list(self.hot_cache)

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """This one."""
        return self

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """One object; see the interface."""
        objs = self.batched_allocate(shape, dtype, 1, fmt, eviction=eviction, busy_loop=busy_loop)
        return objs[0] if objs else None

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
        """All objects or none; see the interface.

        A batch that even an empty pool cannot hold is None at once, also with ``busy_loop``.
        """
        room = Room(tuple(shape), dtype, batch_size, fmt)
        if not self.allocator.can_ever_fit(room.object_bytes, batch_size, fmt):
            return None
        deadline = time.monotonic() + (self._alloc_timeout_s if busy_loop else 0.0)
        while True:
            objs, seen = self._try_allocate(room, eviction, protect)
            if objs is not None:
                return objs
            if self.before_evict is not None and self.before_evict():
                continue
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or self._closed:
                return None
            self.allocator.wait_for_release(seen, remaining_s)

    def _try_allocate(
        self, room: Room, eviction: bool, protect: Collection[ChunkKey]
    ) -> tuple[list[MemoryObj] | None, int]:
        """The objects, or None and the release count after which it is worth trying again."""
        evicted: list[ChunkKey] = []
        with self._lock:
            seen = self.allocator.release_count
            objs = room.take_from(self.allocator)
            if objs is not None or not eviction:
                return objs, seen
            self._note_used_locked()
            kept = {id(obj) for obj in map(self.hot_cache.get, protect) if obj is not None}

            def candidates(count: int) -> list[ChunkKey]:
                passed: list[ChunkKey] = []
                chosen = self._policy.get_evict_candidates(
                    self.hot_cache, count, lambda obj: id(obj) not in kept and _is_idle(obj), passed
                )
                pinned = [key for key in passed if self.hot_cache[key].is_pinned]
                if pinned:
                    self._policy.set_aside(pinned, self.hot_cache)
                return chosen

            def evict(key: ChunkKey) -> None:
                self._take_out_locked(key).ref_count_down()
                evicted.append(key)

            objs = make_room(
                room, self.allocator, candidates, evict, lambda key: self.hot_cache[key].size_bytes
            )
        if evicted:
            self._metrics.evicted(self.name, len(evicted))
            self._tell(EVICT, evicted)
        return objs, seen + len(evicted)

    def memcheck(self) -> MemoryReport:
        """Prove the pool; see the interface."""
        return self.allocator.memcheck()

    def health(self) -> BackendHealth:
        """Healthy until it is closed."""
        if self._closed:
            return BackendHealth(False, "closed")
        return BackendHealth(True, f"{len(self)} chunks")

    def close(self) -> None:
        """Let all chunks go and close the pool."""
        with self._lock:
            self._closed = True
        self.clear()
        self.allocator.close()

    def _tell(self, event: str, keys: Iterable[ChunkKey]) -> None:
        if self._notify is not None:
            for key in keys:
                self._notify(event, key)


def _is_idle(obj: MemoryObj) -> bool:
    """Only the index holds it.

    Pins are read first: a pinned chunk can gain references from its lease at any time, an unpinned
    one with a single reference only through the index, whose lock is held here.
    """
    return not obj.is_pinned and obj.ref_count == 1
