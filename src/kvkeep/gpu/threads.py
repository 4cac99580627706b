"""CopyThreads: the threads that a connector copies with, and the order in which layers are copied.

One object per connector; its methods may be called from any thread. Jobs are copies in memory: they
end by themselves, and the memory that they use may not go before they end, so waiting for them has
no deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise

Job = Callable[[], None]

#: What one thread copies in the 120 us that it takes to wake another one and be woken by it.
HEAD_START_BYTES = 2 << 20


class CopyThreads:
    """Runs copy jobs in ``num_threads`` threads, the caller's included."""

    def __init__(self, num_threads: int) -> None:
        """No thread is started before it is needed.

        Raises:
            ValueError: ``num_threads`` is less than 1.
        """
        if num_threads < 1:
            raise ValueError(f"copy_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._started: list[threading.Thread] = []  # appended to by each thread when it begins

    def split(self, count: int) -> list[range]:
        """``range(count)`` in as many parts as there are threads, none of them empty."""
        parts = min(self.num_threads, count)
        return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]

    def split_after(self, count: int, item_bytes: int) -> list[range]:
        """The same for :meth:`run`, which begins and ends in the calling thread.

        The first part is larger by what that thread copies until the others have woken up. Where
        nothing is left for them it is the only one.

        Args:
            count: items.
            item_bytes: of one of them.
        """
        lead = min(count, HEAD_START_BYTES // max(1, item_bytes))
        first = min(count, lead + max(1, (count - lead) // self.num_threads))
        left = count - first
        others = min(self.num_threads - 1, left)
        ends = [first, *(first + left * (i + 1) // others for i in range(others))]
        return [range(start, end) for start, end in pairwise([0, *ends]) if end > start]

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs, the first of them in the calling thread; returns when all have ended.

        Raises:
            Exception: what the first failed job raised, once all have ended.
        """
        if not jobs:
            return
        others = self._submit(jobs[1:])
        try:
            jobs[0]()
        finally:
            if others:
                wait(others)
        self._finish(others)

    def ahead(
        self, num_layers: int, jobs_of: Callable[[int], Sequence[Job]]
    ) -> Generator[None, None, None]:
        """Run the jobs of one layer after the other, one layer ahead of the caller.

        Yields ``num_layers`` times; at yield ``i`` layer ``i`` is complete and layer ``i + 1`` is
        under way. The next one is queued before layer ``i + 1`` is waited for, so the threads do
        not idle until the caller wakes up. Closing it waits for what is under way.
        """
        pending: deque[list[Future[None]]] = deque()
        begun = 0
        try:
            for layer in range(num_layers):
                while begun < min(layer + 2, num_layers):
                    pending.append(self._submit(jobs_of(begun)))
                    begun += 1
                self._finish(pending[0])
                pending.popleft()
                yield
        finally:
            self._settle([future for layer_futures in pending for future in layer_futures])

    def behind(
        self, num_layers: int, layers: Generator[None, None, None]
    ) -> Generator[None, None, None]:
        """Advance ``layers`` in another thread, one layer behind the caller.

        Yields ``num_layers`` times; at yield ``i`` layer ``i`` is under way and those before it are
        complete. All are when it has ended. Closing it waits for what is under way.
        """
        pending: list[Future[None]] = []
        try:
            for _ in range(num_layers):
                self._finish(pending)
                pending = self._submit([lambda: next(layers)])
                yield
            self._finish(pending)
        finally:
            self._settle(pending)
            layers.close()

    def _finish(self, pending: list[Future[None]]) -> None:
        """Wait for jobs; raises what the first failed one raised once all have ended."""
        errors = [future.exception() for future in pending]
        for error in errors:
            if error is not None:
                raise error

    def _settle(self, pending: list[Future[None]]) -> None:
        """Let jobs go that have not begun and wait for the others, whatever comes of them.

        A generator that is part of a reference cycle may be closed by the garbage collector in one
        of these threads, which cannot wait for itself.
        """
        begun = [future for future in pending if not future.cancel()]
        if threading.current_thread() not in self._started:
            wait(begun)

    def _submit(self, jobs: Sequence[Job]) -> list[Future[None]]:
        if not jobs:
            return []
        with self._lock:
            if self._closed:
                raise RuntimeError("the connector is closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self.num_threads,
                    thread_name_prefix="kvkeep-copy",
                    initializer=lambda: self._started.append(threading.current_thread()),
                )
            return [self._pool.submit(job) for job in jobs]

    def close(self) -> None:
        """Finish what is under way and end the threads; a second call does nothing."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._closed = True
        if pool is not None:
            pool.shutdown(wait=True)
