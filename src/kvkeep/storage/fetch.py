"""Fetch: chunks on their way from a slow tier, owned until somebody takes them.

A tier's answer cannot be stopped once it was asked for. So what arrives belongs to this object: it
is handed over once, or given back the moment it arrives after all interest in it has ended. Started
and awaited in the I/O thread; answers arrive in any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kvkeep.backends.base import StorageBackendInterface
from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.ownership import References
from kvkeep.storage.calls import CallThreads
from kvkeep.storage.guard import BackendGuard

T = TypeVar("T")


class Fetch:
    """One batch of chunks under way.

    Attributes:
        keys: the chunks.
    """

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing has been asked for yet."""
        self.keys = keys
        self._lock = threading.Lock()
        self._objs: list[MemoryObj | None] | None = None  # guarded by _lock
        self._abandoned = False  # guarded by _lock
        self._arrived: Future[None] = Future()
        self._arrived.set_running_or_notify_cancel()  # whoever stops waiting cancels nothing

    def deliver(self, objs: list[MemoryObj | None]) -> None:
        """The tier's answer, with a reference to each object, position by position."""
        with self._lock:
            late = self._abandoned
            if not late:
                self._objs = objs
        if late:
            References(objs).release()
        self._arrived.set_result(None)

    async def take(self) -> list[MemoryObj | None]:
        """Wait for the answer; its references are the caller's from then on."""
        await asyncio.wrap_future(self._arrived)
        with self._lock:
            objs, self._objs = self._objs, None
        return objs or []

    def abandon(self) -> None:
        """Give back what is there, and what arrives later, as it does."""
        with self._lock:
            self._abandoned = True
            objs, self._objs = self._objs, None
        References(objs or ()).release()


class TierCaller:
    """Asks one slow tier, and never waits for it: faults and refused calls are misses."""

    def __init__(
        self, backend: StorageBackendInterface, guard: BackendGuard, threads: CallThreads
    ) -> None:
        """Ask ``backend`` through ``guard``; what may block runs in ``threads``."""
        self.backend = backend
        self._guard = guard
        self._threads = threads
        kind = type(backend)
        plain = StorageBackendInterface
        self._may_block_at_get = kind.batched_get_non_blocking is plain.batched_get_non_blocking
        self._may_block_at_contains = kind.batched_async_contains is plain.batched_async_contains

    async def count(self, keys: Sequence[ChunkKey]) -> int:
        """How many chunks from the first on the tier says that it has."""
        answer: Future[int] = Future()
        answer.set_running_or_notify_cancel()

        def answered(future: Future[int]) -> None:
            answer.set_result(self._guard.count(self.backend, len(keys), future.result))

        def ask() -> None:
            start = partial(self.backend.batched_async_contains, keys)
            self._listen("contains", start, answered, lambda: answer.set_result(0))

        self._call(ask, lambda: answer.set_result(0), may_block=self._may_block_at_contains)
        return await asyncio.wrap_future(answer)

    def fetch(self, keys: Sequence[ChunkKey]) -> Fetch:
        """Start to get chunks."""
        fetch = Fetch(keys)
        nothing: list[MemoryObj | None] = [None] * len(keys)

        def answered(future: Future[list[MemoryObj | None]]) -> None:
            fetch.deliver(self._guard.objects(self.backend, len(keys), future.result))

        def ask() -> None:
            start = partial(self.backend.batched_get_non_blocking, keys)
            self._listen("get", start, answered, lambda: fetch.deliver(nothing))

        self._call(ask, lambda: fetch.deliver(nothing), may_block=self._may_block_at_get)
        return fetch

    def _listen(
        self,
        operation: str,
        start: Callable[[], Future[T]],
        answered: Callable[[Future[T]], None],
        failed: Callable[[], None],
    ) -> None:
        """Have a question asked, and its answer passed on."""
        pending = self._guard.call(self.backend, operation, start, None)
        if pending is None:
            failed()
        else:
            pending.add_done_callback(answered)

    def _call(
        self, ask: Callable[[], None], refused: Callable[[], None], *, may_block: bool
    ) -> None:
        if not may_block:
            ask()
            return

        def ended(done: Future[None]) -> None:
            if done.cancelled():
                refused()

        self._threads.submit(ask).add_done_callback(ended)
