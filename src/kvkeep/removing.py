"""Remover: takes chunks out of every tier once they were loaded (``remove_after_retrieve``).

Called by the engine's threads. The tier in memory forgets a chunk at once; lower tiers may need
I/O for it, which a thread of its own does, so that no model step waits for it. A chunk that
somebody else holds leased stays readable for that one: removing makes a chunk invisible, and its
memory goes when the last reader is done.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from kvkeep.keys import ChunkKey
from kvkeep.request import ENGINE_MEMORY
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
