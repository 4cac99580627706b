"""UnendingCalls: calls of a client library that block and cannot be ended.

Each runs in a thread of its own. Its caller waits for it until a deadline and then goes on; the
thread stays until the library returns, and what the call may still write into stays with it
(``keep``). So a caller never waits too long, memory is never given back too early, and a process
can end meanwhile. Too many calls that do not end are a fault of the store: no more are begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class UnendingCalls:
    """Callable from any thread."""

    def __init__(self, name: str, most_late: int) -> None:
        """No call is running.

        Args:
            name: of the threads.
            most_late: calls beyond their deadline with which another one is still begun.
        """
        self._name = name
        self._most_late = most_late
        self._lock = threading.Lock()
        self._num_late = 0  # guarded by _lock

    @property
    def num_late(self) -> int:
        """Calls that are beyond their deadline and still running."""
        return self._num_late

    def call(
        self,
        run: Callable[[], T],
        deadline: float,
        keep: Callable[[], Sequence[Callable[[], None]]] = tuple,
    ) -> T:
        """The result of ``run``.

        Args:
            run: the call.
            deadline: of ``time.monotonic()``.
            keep: called if the deadline comes first; takes hold of what the call still uses, and
                returns what gives each of it back once the call has ended.

        Raises:
            TimeoutError: the deadline came first.
            ConnectionError: too many calls do not end.
        """
        if self._num_late >= self._most_late:
            raise ConnectionError(f"{self._num_late} earlier calls do not end")
        ended: Future[T] = Future()
        threading.Thread(target=_run, args=(run, ended), name=self._name, daemon=True).start()
        try:
            return ended.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if ended.done():
                return ended.result()
        kept = keep()
        with self._lock:
            self._num_late += 1
        ended.add_done_callback(lambda _: self._end_late(kept))
        raise TimeoutError("the call does not end; it is left to itself")

    def _end_late(self, kept: Sequence[Callable[[], None]]) -> None:
        with self._lock:
            self._num_late -= 1
        for give_back in kept:
            give_back()


def _run(run: Callable[[], T], ended: Future[T]) -> None:
    try:
        result = run()
    except BaseException as error:  # noqa: BLE001  the top of a thread: it is raised in the caller
        ended.set_exception(error)
    else:
        ended.set_result(result)
