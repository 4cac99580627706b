"""AsyncCalls: coroutines of a client library, awaited by threads, with a deadline.

One thread runs an event loop; the coroutines run there and do nothing but wait for the network. A
thread that calls :meth:`AsyncCalls.each` has several of them under way and takes their results as
they come. A coroutine whose deadline is over is cancelled, which ends its request and its
connection; that is why clients which can be awaited are awaited: a blocking call cannot be ended.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")

#: How long the loop may take to start and to end.
_LOOP_TIMEOUT_S = 5.0


class AsyncCalls:
    """Callable from any thread but its own."""

    def __init__(self, name: str) -> None:
        """Start the loop's thread.

        Args:
            name: of the thread.
        """
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_closed = False  # guarded by _lock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def each(
        self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]], deadline: float, window: int
    ) -> Generator[tuple[int, Future[T]], None, None]:
        """Run all calls, ``window`` at a time, and yield (position, what became of it) as they end.

        The next one starts when the caller asks for more. What is still running when the iterator
        is closed, or raises, is cancelled.

        Raises:
            TimeoutError: the deadline (of ``time.monotonic()``) came first.
        """
        ended: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        waiting = iter(enumerate(calls))
        running: dict[Future[T], int] = {}
        try:
            while True:
                for index, call in islice(waiting, window - len(running)):
                    future = self._submit(call)
                    running[future] = index
                    future.add_done_callback(ended.put)
                if not running:
                    return
                try:
                    future = ended.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise TimeoutError(f"{len(running)} requests are not answered") from None
                yield running.pop(future), future
        finally:
            for future in running:
                future.cancel()

    def _submit(self, call: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("the connector is closed")
            return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def close(self) -> None:
        """Cancel what runs and end the thread; a second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LOOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_all())
        finally:
            self._loop.close()


async def _cancel_all() -> None:
    """End every other task of the loop."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
