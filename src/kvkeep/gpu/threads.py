"""CopyThreads: the threads that a connector copies with, and the order in which layers are copied.

One object per connector; its methods may be called from any thread. Jobs are copies in memory: they
end by themselves, and the memory that they use may not go before they end, so waiting for them has
no deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

Job = Callable[[], None]


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

    def split(self, count: int) -> list[range]:
        """``range(count)`` in as many parts as there are threads, none of them empty."""
        parts = min(self.num_threads, count)
        return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]

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
            wait(others)
        for future in others:
            future.result()

    def ahead(
        self, num_layers: int, jobs_of: Callable[[int], Sequence[Job]]
    ) -> Generator[None, None, None]:
        """Run the jobs of one layer after the other, one layer ahead of the caller.

        Yields ``num_layers`` times; at yield ``i`` layer ``i`` is complete and layer ``i + 1`` is
        under way. Closing it waits for what is under way.
        """
        pending = self._submit(jobs_of(0))
        try:
            for layer in range(num_layers):
                wait(pending)
                for future in pending:
                    future.result()
                pending = self._submit(jobs_of(layer + 1)) if layer + 1 < num_layers else []
                yield
        finally:
            wait(pending)

    def _submit(self, jobs: Sequence[Job]) -> list[Future[None]]:
        if not jobs:
            return []
        with self._lock:
            if self._closed:
                raise RuntimeError("the connector is closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="kvkeep-copy")
            return [self._pool.submit(job) for job in jobs]

    def close(self) -> None:
        """Finish what is under way and end the threads; a second call does nothing."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._closed = True
        if pool is not None:
            pool.shutdown(wait=True)
