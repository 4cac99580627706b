"""TaggedKeys: which chunks were stored or loaded under which tags, so that they can be cleared.

Keys are hashes and tell nothing about their tags. Only requests with tags are noted. Callable from
any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from kvkeep.keys import ChunkKey

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
