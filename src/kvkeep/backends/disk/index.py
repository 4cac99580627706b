"""DiskIndex: what this process knows of the directory, in the policy's order.

It says which chunks can be served and which to evict next. It is a view, not the truth: another
process may remove a file, which then is a miss when it is read. One lock guards index and policy;
it is held for bookkeeping only, never across a system call. Callable from any thread.

DiskReports: under which names the disk tier counts what happens. Callable from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvkeep.backends.io_pool import IOPool
from kvkeep.backends.slow_tier import CircuitBreaker
from kvkeep.codec.frame import ChunkMeta
from kvkeep.hashing import ChunkKey
from kvkeep.metrics import LOAD, STORE, Metrics
from kvkeep.policy.base import CachePolicy

#: Most files that could not be removed whose keys are remembered, so that they are not asked again.
MAX_BANNED = 65536


class DiskEntry:
    """One chunk that is on the disk, or on its way there.

    Attributes:
        meta: what the chunk is in memory.
        ready: the file is whole and has its name. Until then the chunk is invisible.
        mine: written with this engine's identity. Others are kept and evicted, never served.
        inode: of the file, once there is one.
        readers: loads in progress, which eviction waits for.
    """

    __slots__ = ("inode", "meta", "mine", "readers", "ready")

    def __init__(
        self, meta: ChunkMeta, *, ready: bool, mine: bool, inode: int | None = None
    ) -> None:
        self.meta = meta
        self.inode = inode
        self.ready = ready  # guarded by the index's lock
        self.mine = mine
        self.readers = 0  # guarded by the index's lock


class DiskIndex:
    """Chunk keys, their state, and the order of eviction."""

    def __init__(self, policy: CachePolicy[DiskEntry]) -> None:
        """An empty index.

        Args:
            policy: the order; it belongs to this index from now on.
        """
        self._policy = policy
        self._lock = threading.Lock()
        self._entries = policy.init_mutable_mapping()  # guarded by _lock
        self._num_servable = 0  # guarded by _lock
        self._banned: dict[ChunkKey, None] = {}  # guarded by _lock
        self._used: deque[Sequence[ChunkKey]] = deque()  # used, not noted yet; oldest first

    def find(self, key: ChunkKey) -> ChunkMeta | None:
        """What the chunk is, if it can be served."""
        with self._lock:
            entry = self._entries.get(key)
            return entry.meta if entry is not None and entry.ready and entry.mine else None

    def is_known(self, key: ChunkKey) -> bool:
        """The disk has nothing new to say: an entry of this engine, or a file not to be served."""
        with self._lock:
            entry = self._entries.get(key)
            return key in self._banned or (entry is not None and entry.mine)

    def is_listed(self, key: ChunkKey) -> bool:
        """The scan can pass over its file: there is an entry, or it is not to be served."""
        with self._lock:
            return key in self._entries or key in self._banned

    def run_length(self, keys: Sequence[ChunkKey]) -> int:
        """How many keys from the first on can be served."""
        with self._lock:
            for position, key in enumerate(keys):
                entry = self._entries.get(key)
                if entry is None or not entry.ready or not entry.mine:
                    return position
        return len(keys)

    def note_chain(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks follow each other in one prompt; all but the first are missing here."""
        with self._lock:
            self._policy.note_chain(keys)

    def begin(self, chunks: Iterable[tuple[ChunkKey, ChunkMeta]]) -> dict[ChunkKey, DiskEntry]:
        """Make invisible entries for chunks to write, those without one already.

        The first chunk becomes the most recent one: suffixes are evicted before their prefixes.
        """
        made: dict[ChunkKey, DiskEntry] = {}
        with self._lock:
            for key, meta in reversed(list(chunks)):
                there = self._entries.get(key)
                if there is not None and not there.mine:
                    self._drop_locked(key)  # another engine's file under this name is replaced
                if key not in self._entries:
                    made[key] = DiskEntry(meta, ready=False, mine=True)
                    self._entries[key] = made[key]
                    self._policy.update_on_put(key)
        return made

    def finish(self, key: ChunkKey, entry: DiskEntry) -> bool:
        """Make a written chunk visible; False if it was removed meanwhile."""
        with self._lock:
            if self._entries.get(key) is not entry:
                return False
            entry.ready = True
            self._num_servable += 1
            self._banned.pop(key, None)
            return True

    def is_current(self, key: ChunkKey, entry: DiskEntry) -> bool:
        """The entry was not removed or replaced."""
        with self._lock:
            return self._entries.get(key) is entry

    def adopt(self, key: ChunkKey, meta: ChunkMeta, *, mine: bool, inode: int) -> bool:
        """Enter a chunk file that was found; False if the key is known already."""
        with self._lock:
            if key in self._entries or key in self._banned:
                return False
            self._entries[key] = DiskEntry(meta, ready=True, mine=mine, inode=inode)
            self._num_servable += mine
            self._policy.update_on_put(key)
            return True

    def forget(self, key: ChunkKey, entry: DiskEntry | None = None) -> bool:
        """Remove an entry; with ``entry`` only if it is that one.

        Returns:
            The chunk could be served until now.
        """
        with self._lock:
            there = self._entries.get(key)
            if there is None or (entry is not None and there is not entry):
                return False
            self._drop_locked(key)
            return there.ready and there.mine

    def hide(self, key: ChunkKey) -> DiskEntry | None:
        """Take out and ban whatever is there under a key, also what is being written."""
        with self._lock:
            entry = self._entries.get(key)
        self.ban(key, entry)
        return entry

    def is_wanted(self, key: ChunkKey) -> bool:
        """There is an entry of this engine, perhaps being written."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and entry.mine

    def is_banned(self, key: ChunkKey) -> bool:
        """What is on the disk under this key must not be served."""
        with self._lock:
            return key in self._banned

    def ban(self, key: ChunkKey, entry: DiskEntry | None = None) -> None:
        """Never serve what is on the disk under this key; a chunk written anew ends that.

        Args:
            key: the chunk.
            entry: the entry that stood for the file. Another one, being written now, stays.
        """
        with self._lock:
            there = self._entries.get(key)
            if there is not None and (there is entry or not there.mine):
                self._drop_locked(key)
            self._banned[key] = None
            if len(self._banned) > MAX_BANNED:
                del self._banned[next(iter(self._banned))]

    def unban(self, key: ChunkKey) -> None:
        """The file is gone; the disk may be asked again."""
        with self._lock:
            self._banned.pop(key, None)

    def start_reading(self, key: ChunkKey) -> DiskEntry | None:
        """Keep the chunk from being evicted by this process while it is read."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not entry.ready or not entry.mine:
                return None
            entry.readers += 1
            return entry

    def end_reading(self, entry: DiskEntry) -> None:
        """The other half of :meth:`start_reading`."""
        with self._lock:
            entry.readers -= 1

    def note_use(self, keys: Sequence[ChunkKey]) -> None:
        """Note that chunks were used, the last one first: a prefix ends up the most recent.

        A lease may end within the garbage collector, in the middle of any call here, so this never
        waits for the lock: whoever asks for a victim next notes what is queued.
        """
        self._used.append(keys)
        if self._lock.acquire(blocking=False):
            try:
                self._note_used_locked()
            finally:
                self._lock.release()

    def _note_used_locked(self) -> None:
        while self._used:
            here = [key for key in reversed(self._used.popleft()) if key in self._entries]
            self._policy.update_on_hits(here, self._entries)

    def note_order(self, keys: Sequence[ChunkKey]) -> None:
        """Let these chunks of one prompt be evicted from the last one on."""
        with self._lock:
            self._note_used_locked()
            self._policy.note_order(keys, self._entries)

    def pop_victim(self) -> ChunkKey | None:
        """Take the chunk to evict next out of the index; its file is the caller's to remove."""
        with self._lock:
            self._note_used_locked()
            candidates = self._policy.get_evict_candidates(self._entries, 1, _can_evict)
            for key in candidates:
                self._drop_locked(key)
                return key
        return None

    def keep_only(self, exists: Callable[[ChunkKey], bool]) -> None:
        """Forget ready entries whose file is gone. ``exists`` is called without the lock."""
        with self._lock:
            ready = [(key, entry) for key, entry in self._entries.items() if entry.ready]
        for key, entry in ready:
            if not exists(key):
                self.forget(key, entry)

    def keys(self) -> list[ChunkKey]:
        """Every chunk that can be served."""
        with self._lock:
            return [key for key, entry in self._entries.items() if entry.ready and entry.mine]

    def all_mine(self) -> list[ChunkKey]:
        """Every chunk of this engine, also those that are being written."""
        with self._lock:
            return [key for key, entry in self._entries.items() if entry.mine]

    def __len__(self) -> int:
        """Chunks that can be served."""
        with self._lock:
            return self._num_servable

    def _drop_locked(self, key: ChunkKey) -> None:
        entry = self._entries.pop(key)
        self._num_servable -= entry.ready and entry.mine
        self._policy.update_on_force_evict(key)


def _can_evict(entry: DiskEntry) -> bool:
    return entry.ready and not entry.readers


TIER = "LocalDiskBackend"


class DiskReports:
    """The tier's part of the metrics; one method per kind of event."""

    def __init__(self, metrics: Metrics) -> None:
        """Count into ``metrics``."""
        self._metrics = metrics

    def watch(
        self, index: DiskIndex, pool: IOPool, breakers: tuple[CircuitBreaker, CircuitBreaker]
    ) -> None:
        """Read the tier's gauges from their owners; the breakers are of loads, and of stores."""
        loads, stores = breakers
        self._metrics.watch_chunks(TIER, lambda: float(len(index)))
        self._metrics.watch_breaker(TIER, LOAD, lambda: loads.is_open)
        self._metrics.watch_breaker(TIER, STORE, lambda: stores.is_open)
        self._metrics.watch_queue(
            TIER,
            loads=lambda: pool.num_loads,
            stores=lambda: pool.num_stores,
            num_bytes=lambda: pool.queued_bytes,
        )

    def fault(self, operation: str, cause: str) -> None:
        """A call failed, or something on the disk did not verify. A miss by itself is no fault."""
        self._metrics.failure(TIER, operation, cause)

    def refused(self, cause: str) -> None:
        """A put was turned away at the door; the caller counts the chunks that it lost."""
        self._metrics.failure(TIER, "put", cause)

    def dropped(self, cause: str) -> None:
        """A chunk was taken in and then not stored; only this tier can know."""
        self._metrics.dropped(TIER, cause, 1)

    def evicted(self) -> None:
        """The policy gave a chunk up."""
        self._metrics.evicted(TIER, 1)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """A chunk was read and verified."""
        self._metrics.moved(TIER, LOAD, size_bytes, seconds)

    def stored(self, size_bytes: int, seconds: float) -> None:
        """A chunk was written."""
        self._metrics.moved(TIER, STORE, size_bytes, seconds)
