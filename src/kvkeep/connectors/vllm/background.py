"""BackgroundLoads: loads that run between a worker's steps instead of before one.

One thread, in the order in which the loads were planned, so that all ranks load in one order. Every
load that was handed in comes out again once, whatever becomes of it: vLLM waits for that.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvkeep.connectors.vllm.metadata import LoadSpec

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that it is shown

#: How long closing waits for a load that is under way.
CLOSE_TIMEOUT_S = 10.0


class BackgroundLoads:
    """A thread for loads; it starts with the first one."""

    def __init__(self, load: Callable[[LoadSpec], int]) -> None:
        """No thread yet.

        Args:
            load: carries a load out, and returns the token up to which all is there. Must not
                raise.
        """
        self._load = load
        self._wake = threading.Condition()
        self._waiting: deque[LoadSpec] = deque()  # guarded by _wake
        self._done: list[tuple[LoadSpec, int]] = []  # guarded by _wake
        self._closed = False  # guarded by _wake
        self._thread: threading.Thread | None = None  # guarded by _wake

    def submit(self, spec: LoadSpec) -> bool:
        """Queue a load.

        Returns:
            False if it is over at once, with nothing loaded: after the close, or where the system
            has no thread to give. Its lease is the caller's then.
        """
        with self._wake:
            if self._closed or not self._has_thread_locked():
                self._done.append((spec, spec.start))
                return False
            self._waiting.append(spec)
            self._wake.notify()
            return True

    def _has_thread_locked(self) -> bool:
        """There is a thread, or one could be started."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvkeep-load", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("no thread for loads between steps: %s", error)
                return False
            self._thread = thread
        return True

    def take_done(self) -> list[tuple[LoadSpec, int]]:
        """Loads that have ended since the last call, and the token up to which all is there."""
        with self._wake:
            done, self._done = self._done, []
            return done

    def close(self) -> None:
        """End the load under way and drop the others; a second call does nothing."""
        with self._wake:
            self._closed = True
            self._done += [(spec, spec.start) for spec in self._waiting]
            self._waiting.clear()
            self._wake.notify()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """The thread."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                spec = self._waiting.popleft()
            loaded_to = self._load(spec)
            with self._wake:
                self._done.append((spec, loaded_to))
