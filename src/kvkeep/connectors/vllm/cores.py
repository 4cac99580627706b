"""Cores: which processor cores a worker's threads may use.

On the CPU, vLLM binds the worker's own thread to one core and its others to one each, and a thread
starts with the cores of the one that starts it. So kvkeep's threads would all share one core with
the engine's, which spins there while it waits. Threads that are started within ``all_of_them`` may
use every core that the engine gave this worker, and so may the engine's thread until it has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_THREADS = Path("/proc/self/task")


class Cores:
    """The cores of this process's threads, taken when it is made. Engine's thread only."""

    def __init__(self) -> None:
        """Look at the threads that there are; without ``sched_getaffinity`` there is one set."""
        self._own: set[int] = set()
        self._all: set[int] = set()
        if hasattr(os, "sched_getaffinity"):
            self._own = self._all = os.sched_getaffinity(0)
            for thread in _THREADS.iterdir() if _THREADS.exists() else ():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    self._all = self._all | os.sched_getaffinity(int(thread.name))

    @contextlib.contextmanager
    def all_of_them(self) -> Iterator[None]:
        """Let this thread, and those that it starts, use all of the worker's cores."""
        if self._own == self._all:
            yield
            return
        _bind(self._all)
        try:
            yield
        finally:
            _bind(self._own)


def _bind(cores: set[int]) -> None:
    with contextlib.suppress(OSError):  # they were taken away: a load must not fail for that
        os.sched_setaffinity(0, cores)
