"""Remover: takes chunks out of every tier once they were loaded (``remove_after_retrieve``).

Called by the engine's threads. The tier in memory forgets a chunk at once; lower tiers may need
I/O for it, which a thread of its own does, so that no model step waits for it. A chunk that
somebody else holds leased stays readable for that one: removing makes a chunk invisible, and its
memory goes when the last reader is done.

TaggedKeys: which chunks were stored or loaded under which tags, so that they can be cleared.

Keys are hashes and tell nothing about their tags. Only requests with tags are noted. Callable from
any thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence

from kvkeep.engine.request import ENGINE_MEMORY
from kvkeep.hashing import ChunkKey
from kvkeep.storage.manager import StorageManager

#: Loads whose chunks wait to be removed from lower tiers; of later ones they stay there.
QUEUE_LOADS = 1024
#: How long :meth:`Remover.close` waits for removals that are queued.
CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Remover:
    """Removes what was loaded."""

    def __init__(self, storage: StorageManager) -> None:
        """No thread is started before it is needed.

        Args:
            storage: the tiers.
        """
        self._storage = storage
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._queue: queue.Queue[Sequence[ChunkKey] | None] = queue.Queue(QUEUE_LOADS)

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        """Forget these chunks in memory at once and in lower tiers soon."""
        own = self._storage.allocator_backend.name
        names = self._storage.storage_backends.keys()
        self._storage.batched_remove(keys, names & {own})
        if keys and names - {own} and not self._submit(list(keys)):
            self._storage.metrics.failure(ENGINE_MEMORY, "remove", "full")

    def close(self) -> None:
        """Finish what is queued, within a deadline; a second call does nothing."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._closed = True
        if thread is None:
            return
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            _log.warning("chunks that were loaded stay in lower tiers: removing them is too slow")
        thread.join(CLOSE_TIMEOUT_S)

    def _submit(self, keys: list[ChunkKey]) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvkeep-remove", daemon=True)
                self._thread.start()
            try:
                self._queue.put_nowait(keys)
            except queue.Full:
                return False
        return True

    def _run(self) -> None:
        """The thread: one load's chunks after the other."""
        own = self._storage.allocator_backend.name
        lower = self._storage.storage_backends.keys() - {own}
        while (keys := self._queue.get()) is not None:
            try:
                self._storage.batched_remove(keys, lower)
            except Exception as error:  # noqa: BLE001  the thread outlives every load
                self._storage.metrics.failure(ENGINE_MEMORY, "remove", type(error).__name__)
                _log.warning("chunks that were loaded could not be removed: %s", error)


Tags = tuple[tuple[str, str], ...]

#: Keys of one set of tags up to which nobody asks whether the chunks still exist.
MIN_PRUNE = 1024


class TaggedKeys:
    """Keys by the exact tags of the requests that used them."""

    def __init__(self, is_stored: Callable[[ChunkKey], bool]) -> None:
        """Nothing is noted.

        Args:
            is_stored: whether a chunk still exists; those that do not are forgotten in time.
        """
        self._is_stored = is_stored
        self._lock = threading.Lock()
        self._keys: dict[Tags, set[ChunkKey]] = {}  # guarded by _lock
        self._prune_at: dict[Tags, int] = {}  # guarded by _lock

    def note(self, tags: Tags, keys: Collection[ChunkKey]) -> None:
        """A request with ``tags`` has stored or loaded ``keys``; nothing is noted without tags."""
        if not tags or not keys:
            return
        with self._lock:
            known = self._keys.setdefault(tags, set())
            known.update(keys)
            if len(known) < self._prune_at.get(tags, MIN_PRUNE):
                return
            candidates = list(known)
        gone = [key for key in candidates if not self._is_stored(key)]
        with self._lock:
            kept = self._keys.get(tags)
            if kept is not None:
                kept.difference_update(gone)
                self._prune_at[tags] = max(MIN_PRUNE, 2 * len(kept))

    def of(self, tags: Tags) -> list[ChunkKey]:
        """The keys noted under exactly these tags."""
        with self._lock:
            return list(self._keys.get(tags, ()))

    def take(self, tags: Tags) -> list[ChunkKey]:
        """The keys noted under exactly these tags, which are forgotten."""
        with self._lock:
            self._prune_at.pop(tags, None)
            return list(self._keys.pop(tags, ()))

    def forget_all(self) -> None:
        """Forget everything: all chunks are gone."""
        with self._lock:
            self._keys.clear()
            self._prune_at.clear()
