"""Prefaulter: commits a pool's memory shortly before it is used for the first time.

The system commits memory when it is first written, which costs more than the copy itself. A thread
of low priority does it ahead of the requests: always for the next few slots that no object has had
yet, never for the whole pool. Made by whoever owns the pool, and closed before the pool is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading

from kvkeep.errors import OwnershipError
from kvkeep.memory.allocators import PagedAllocator
from kvkeep.memory.placement import available_bytes

_log = logging.getLogger(__name__)

#: Bytes committed by one call, about a millisecond of work; closing waits for one.
STEP_BYTES = 4 << 20
#: The thread looks around that often even if nobody calls it.
_IDLE_S = 60.0
#: How long :meth:`Prefaulter.close` waits for the thread.
_CLOSE_S = 10.0
#: Steps behind the process, on the scale from -20 (served first) to 19.
_NICENESS, _LAST = 10, 19


class Prefaulter:
    """A thread that keeps ``ahead_bytes`` beyond the used part of a pool committed."""

    def __init__(
        self, allocator: PagedAllocator, *, ahead_bytes: int, keep_free_bytes: int = 0
    ) -> None:
        """Start at once.

        Args:
            allocator: the pool.
            ahead_bytes: how far ahead of the last slot that was ever used.
            keep_free_bytes: do nothing while the system has less available memory than this.

        Raises:
            ValueError: ``ahead_bytes`` is not positive.
        """
        if ahead_bytes < 1:
            raise ValueError(f"a prefaulter needs a positive distance, got {ahead_bytes}")
        self._allocator = allocator
        self._ahead_bytes = ahead_bytes
        self._keep_free_bytes = keep_free_bytes
        self._committed = 0  # arena offset; written by the thread alone
        self._woken = threading.Event()
        self._closing = False
        self._woken.set()
        allocator.on_fresh = self._woken.set
        self._thread = threading.Thread(target=self._run, name="kvkeep-prefault", daemon=True)
        self._thread.start()

    @property
    def committed(self) -> int:
        """Arena offset up to which memory was committed ahead; 0 before the first step."""
        return self._committed

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        self._closing = True
        self._allocator.on_fresh = None
        self._woken.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        _lower_priority()
        try:
            while not self._closing:
                self._woken.wait(_IDLE_S)
                self._woken.clear()
                self._catch_up()
        except OSError as error:
            _log.warning("memory is not committed ahead: %s", error)
        except OwnershipError:  # the pool was closed first
            return

    def _catch_up(self) -> None:
        """Commit step by step up to the distance, as far as memory allows."""
        while not self._closing:
            fresh, end = self._allocator.fresh_range()
            start = max(self._committed, fresh)
            step_end = min(start + STEP_BYTES, fresh + self._ahead_bytes, end)
            if step_end <= start or available_bytes() - STEP_BYTES < self._keep_free_bytes:
                return
            self._allocator.arena.prefault(start, step_end)
            self._committed = step_end


def _lower_priority() -> None:
    """Let every other thread run first, where threads have priorities of their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            behind = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(behind, _LAST))
