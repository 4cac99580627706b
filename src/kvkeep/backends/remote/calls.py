"""StoreCalls: calls to a store, each with a deadline, one retry and a breaker. In I/O threads only.

Every call can be made twice without harm, and is made a second time, within the same deadline, if
it failed for another reason than the deadline: its connection may have been an old one of a server
that has been restarted (fault 35). What fails then is counted and told to the breaker.

AsyncCalls: coroutines of a client library, awaited by threads, with a deadline.

One thread runs an event loop; the coroutines run there and do nothing but wait for the network. A
thread that calls :meth:`AsyncCalls.each` has several of them under way and takes their results as
they come. A coroutine whose deadline is over is cancelled, which ends its request and its
connection; that is why clients which can be awaited are awaited: a blocking call cannot be ended.

DetachedCalls: calls of a client library that block and cannot be ended.

Each runs in a thread of its own. Its caller waits for it until a deadline and then goes on; the
thread stays until the library returns, and what the call may still write into stays with it
(``keep``). So a caller never waits too long, memory is never given back too early, and a process
can end meanwhile. Too many calls that do not end are a fault of the store: no more are begun.

ConcurrencyLimit: how many calls run at once of a client library that spins while it waits.

Such a call keeps a core busy until it ends, so more calls than there are cores to spare take the
cores from the threads that move the bytes, and from the engine. The limit is for speed
only: a call that waits too long for it goes on without, so one that hangs holds up no other.
Callable from any thread.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from kvkeep.backends.remote.base import TIER, Refusal, RemoteConnector, RemoteReports, Value
from kvkeep.backends.remote.values import MISSING, ChunkLoad
from kvkeep.backends.slow_tier import CircuitBreaker
from kvkeep.errors import BackendError, BackendTimeoutError

R = TypeVar("R")

#: A store that was given less time, because its call had waited for a thread, is not to blame for
#: a timeout.
FAIR_S = 0.1


class StoreCalls:
    """The verbs of a connector with deadlines as values of ``time.monotonic()``.

    All raise BackendError, after they have counted it.
    """

    def __init__(self, connector: RemoteConnector, reports: RemoteReports) -> None:
        """Call ``connector``."""
        self.connector = connector
        self._reports = reports

    def sizes(self, names: Sequence[str], deadline: float, breaker: CircuitBreaker) -> list[int]:
        """Size of each value in bytes; 0 where there is none."""

        def run(timeout_s: float) -> list[int]:
            answer = self.connector.sizes(names, timeout_s)
            return _checked(answer, len(names), "sizes")

        return self._call("lookup", run, deadline, breaker)

    def get(self, loads: Sequence[ChunkLoad], deadline: float, breaker: CircuitBreaker) -> str:
        """Fill loads; returns the cause of those that are not over then.

        A call that was too slow for all of them, but not for one, is no failure of the store.
        """

        def run(timeout_s: float) -> str:
            rest = [load for load in loads if not load.is_over]
            try:
                if rest:
                    self.connector.get([load.name for load in rest], rest, timeout_s)
            except BackendTimeoutError:
                if not any(load.is_over for load in rest):
                    raise
                return "timeout"
            return MISSING

        return self._call("get", run, deadline, breaker)

    def put(
        self,
        names: Sequence[str],
        values: Sequence[Value],
        deadline: float,
        breaker: CircuitBreaker,
    ) -> list[Refusal | None]:
        """Store values; None where it was done."""

        def run(timeout_s: float) -> list[Refusal | None]:
            return _checked(self.connector.put(names, values, timeout_s), len(names), "put")

        return self._call("put", run, deadline, breaker)

    def remove(self, names: Sequence[str], deadline: float) -> list[bool]:
        """Remove values; True where there was one. What can be read alone is of use, too."""

        def run(timeout_s: float) -> list[bool]:
            return _checked(self.connector.remove(names, timeout_s), len(names), "remove")

        return self._call("remove", run, deadline, CircuitBreaker())  # which nobody asks

    def ping(self, deadline: float, breaker: CircuitBreaker) -> None:
        """Ask whether the store answers."""
        self._call("ping", self.connector.ping, deadline, breaker)

    def names(self, prefix: str, timeout_s: float, breaker: CircuitBreaker) -> Iterator[str]:
        """Every name that starts with ``prefix``; never begun a second time."""
        try:
            yield from self.connector.names(prefix, timeout_s)
        except Exception as error:  # other people's code begins here
            self._reports.failed("list", error)
            breaker.failed()
            raise _as_backend_error(error, "list") from error
        breaker.succeeded()

    def _call(
        self, operation: str, run: Callable[[float], R], deadline: float, breaker: CircuitBreaker
    ) -> R:
        """The answer of ``run``, which is given the seconds that are left."""
        may_retry = True
        while True:
            timeout_s = deadline - time.monotonic()
            if timeout_s <= 0:
                error: Exception = BackendTimeoutError(
                    "there was no time left for it", backend=TIER, operation=operation
                )
                self._reports.failed(operation, error)
                raise error
            try:
                answer = run(timeout_s)
            except Exception as failure:  # other people's code begins here
                self._reports.failed(operation, failure)
                is_late = isinstance(failure, BackendTimeoutError) or time.monotonic() > deadline
                if may_retry and not is_late:
                    may_retry = False
                    continue
                if timeout_s >= FAIR_S or not is_late:
                    breaker.failed()
                raise _as_backend_error(failure, operation) from failure
            breaker.succeeded()
            return answer


def _checked(answer: list[R], count: int, operation: str) -> list[R]:
    """An answer of another length is never paired with names (faults 1, 2)."""
    if len(answer) != count:
        raise BackendError(f"{len(answer)} answers for {count}", backend=TIER, operation=operation)
    return answer


def _as_backend_error(error: Exception, operation: str) -> BackendError:
    if isinstance(error, BackendError):
        return error
    return BackendError(f"{type(error).__name__}: {error}", backend=TIER, operation=operation)


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


class DetachedCalls:
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


#: Longer than a call takes in a fast network, and much shorter than any deadline.
_PATIENCE_S = 0.25


class ConcurrencyLimit:
    """A number of turns."""

    def __init__(self, most: int, *, patience_s: float = _PATIENCE_S) -> None:
        """All are free.

        Args:
            most: calls at once.
            patience_s: whoever has waited so long, or for half of its time, goes on without.
        """
        self._free = threading.Semaphore(most)
        self._patience_s = patience_s

    @contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Wait for a turn, and have it.

        Args:
            deadline: of the call, of ``time.monotonic()``.
        """
        left_s = (deadline - time.monotonic()) / 2
        has_turn = self._free.acquire(timeout=max(0.0, min(self._patience_s, left_s)))
        try:
            yield
        finally:
            if has_turn:
                self._free.release()
