"""FaultyBackend: wraps a backend and makes it fail, stall or lie at chosen calls.

For tests of whatever stands above a backend. Callable from any thread; the calls of one operation
are numbered in the order in which they arrive.

SlowBackend: a tier whose reads take their time, or wait until they are let through.

For tests and measurements of whatever must not wait for a slow tier. It keeps chunks as DictBackend
does, and can be named as a plugin: ``{name: slow, module: "kvkeep.testing.faulty:SlowBackend",
settings: {seconds_per_chunk: 0.2}}``. Callable from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

import torch

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    BackendHealth,
    Lease,
    PutOutcome,
    StorageBackendInterface,
    StoragePluginInterface,
)
from kvkeep.backends.reference import DictBackend
from kvkeep.errors import BackendError, ConfigError
from kvkeep.hashing import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj, MemoryReport, References


class FaultKind(StrEnum):
    """What goes wrong."""

    RAISE = "raise"
    """A BackendError instead of the call."""
    RAISE_AFTER = "raise_after"
    """The call is made, or half of a put is; then a BackendError."""
    SHORT = "short"
    """The answer to a batch leaves its misses out, or else its first entry."""
    LONG = "long"
    """The answer to a batch has an entry too many."""
    DROP = "drop"
    """A put says STORED and keeps nothing; a get misses; contains and remove say yes."""
    DELAY = "delay"
    """The call is late, or ends early when the backend is closed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        operation: ``"put"``, ``"get"``, ``"contains"``, ``"remove"``, ``"clear"``, ``"unpin"``,
            ``"health"``, ``"allocate"`` or ``"close"``.
        kind: what goes wrong.
        first: number of the operation's first call that is concerned, from 0.
        count: how many calls are; None is all from then on.
        delay_s: seconds of a DELAY.
        error: what is raised instead of a BackendError.
    """

    operation: str
    kind: FaultKind
    first: int = 0
    count: int | None = None
    delay_s: float = 0.0
    error: type[Exception] | None = None


class FaultyBackend(StorageBackendInterface):
    """A backend with faults. Without faults it behaves as the one that it wraps."""

    def __init__(self, inner: StorageBackendInterface, faults: Sequence[Fault] = ()) -> None:
        """Wrap ``inner`` under its own name."""
        self.inner = inner
        self.name = inner.name
        self.faults = list(faults)
        self.calls: Counter[str] = Counter()  # guarded by _lock
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def _enter(self, operation: str) -> FaultKind | None:
        """Number a call; raise or wait if it must, and say what else goes wrong with it."""
        with self._lock:
            number = self.calls[operation]
            self.calls[operation] += 1
        for fault in self.faults:
            after = number - fault.first
            if fault.operation != operation or after < 0:
                continue
            if fault.count is not None and after >= fault.count:
                continue
            if fault.kind is FaultKind.RAISE:
                raise self._error(operation, fault)
            if fault.kind is FaultKind.DELAY:
                self._closing.wait(fault.delay_s)
                continue
            return fault.kind
        return None

    def _error(self, operation: str, fault: Fault | None = None) -> Exception:
        if fault is not None and fault.error is not None:
            return fault.error(f"{operation} fails on purpose")
        return BackendError("fails on purpose", backend=self.name, operation=operation)

    def contains(self, key: ChunkKey, *, pin: Lease | None = None) -> bool:
        """See the interface."""
        return self.batched_contains([key], pin=pin) == 1

    def batched_contains(self, keys: Sequence[ChunkKey], *, pin: Lease | None = None) -> int:
        """See the interface."""
        kind = self._enter("contains")
        if kind is FaultKind.DROP:
            return len(keys)
        found = self.inner.batched_contains(keys, pin=pin)
        if kind is FaultKind.RAISE_AFTER:
            raise self._error("contains")
        if kind is FaultKind.SHORT:
            return -1
        return len(keys) + 1 if kind is FaultKind.LONG else found

    def known_run(self, keys: Sequence[ChunkKey]) -> int:
        """See the interface; never fails."""
        return self.inner.known_run(keys)

    def make_way(self) -> AbstractContextManager[None]:
        """See the interface; never fails."""
        return self.inner.make_way()

    def batched_submit_put_task(
        self,
        keys: Sequence[ChunkKey],
        objs: Sequence[MemoryObj],
        *,
        on_complete: Callable[[ChunkKey], None] | None = None,
    ) -> list[PutOutcome]:
        """See the interface."""
        kind = self._enter("put")
        if kind is FaultKind.DROP:
            return [PutOutcome.STORED] * len(keys)
        if kind is FaultKind.RAISE_AFTER:
            half = len(keys) // 2
            self.inner.batched_submit_put_task(keys[:half], objs[:half], on_complete=on_complete)
            raise self._error("put")
        outcomes = self.inner.batched_submit_put_task(keys, objs, on_complete=on_complete)
        if kind is FaultKind.SHORT:
            kept: list[PutOutcome] = [
                outcome for outcome in outcomes if outcome != PutOutcome.PRESENT
            ]
            return kept[: len(keys) - 1]
        return [*outcomes, PutOutcome.STORED] if kind is FaultKind.LONG else outcomes

    def batched_get_blocking(self, keys: Sequence[ChunkKey]) -> list[MemoryObj | None]:
        """See the interface."""
        kind = self._enter("get")
        if kind is FaultKind.DROP:
            return [None] * len(keys)
        with References() as held:
            objs = self.inner.batched_get_blocking(keys)
            held.adopt(objs)
            if kind is FaultKind.RAISE_AFTER:
                raise self._error("get")
            if kind is FaultKind.SHORT:
                present = [obj for obj in held.detach() if obj is not None]
                if len(present) == len(keys):
                    References([present.pop(0)]).release()
                return [*present]
            held.detach()
        return [*objs, None] if kind is FaultKind.LONG else objs

    def remove(self, key: ChunkKey) -> bool:
        """See the interface."""
        return self._enter("remove") is FaultKind.DROP or self.inner.remove(key)

    def batched_unpin(self, entries: Sequence[tuple[ChunkKey, MemoryObj]]) -> None:
        """See the interface; even when it raises, the pins are given back."""
        self.inner.batched_unpin(entries)
        self._enter("unpin")

    def touch_cache(self, keys: Sequence[ChunkKey]) -> None:
        """See the interface."""
        self.inner.touch_cache(keys)

    def note_order(self, keys: Sequence[ChunkKey]) -> None:
        """See the interface."""
        self.inner.note_order(keys)

    def clear(self) -> int:
        """See the interface."""
        self._enter("clear")
        return self.inner.clear()

    def keys(self) -> list[ChunkKey]:
        """See the interface; never fails."""
        return self.inner.keys()

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """See the interface; never fails."""
        return self.inner.get_allocator_backend()

    def health(self) -> BackendHealth:
        """See the interface; a DROP says that it is unhealthy."""
        if self._enter("health") is FaultKind.DROP:
            return BackendHealth(False, "unhealthy on purpose")
        return self.inner.health()

    def close(self) -> None:
        """End all delays and close the inner backend, also if this call raises."""
        self._closing.set()
        try:
            self._enter("close")
        finally:
            self.inner.close()


class FaultyAllocatorBackend(FaultyBackend, AllocatorBackendInterface):
    """The same for a backend that hands out memory; a DROP of ``"allocate"`` is no room."""

    def __init__(self, inner: AllocatorBackendInterface, faults: Sequence[Fault] = ()) -> None:
        """Wrap ``inner`` under its own name."""
        super().__init__(inner, faults)
        self._allocator = inner

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        """This one."""
        return self

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """See the interface."""
        objs = self.batched_allocate(shape, dtype, 1, fmt, eviction=eviction, busy_loop=busy_loop)
        return objs[0] if objs else None

    def batched_allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        batch_size: int,
        fmt: MemoryFormat = MemoryFormat.KV_2LTD,
        *,
        eviction: bool = True,
        busy_loop: bool = True,
        protect: Collection[ChunkKey] = (),
    ) -> list[MemoryObj] | None:
        """See the interface."""
        if self._enter("allocate") is FaultKind.DROP:
            return None
        return self._allocator.batched_allocate(
            shape, dtype, batch_size, fmt, eviction=eviction, busy_loop=busy_loop, protect=protect
        )

    def memcheck(self) -> MemoryReport:
        """See the interface; never fails."""
        return self._allocator.memcheck()


#: How long a read waits for the gate at most.
_GATE_TIMEOUT_S = 60.0


class SlowBackend(DictBackend, StoragePluginInterface):
    """Chunks in a dict behind a gate.

    Attributes:
        seconds_per_chunk: how long each chunk of a read takes.
        gate: reads wait for it to be set; it is, at first.
        reads: the chunks of every read that has begun, in order.
    """

    def __init__(
        self,
        allocator_backend: AllocatorBackendInterface,
        *,
        name: str = "SlowBackend",
        seconds_per_chunk: float = 0.0,
    ) -> None:
        """Start empty, with an open gate."""
        super().__init__(allocator_backend, name=name)
        self.seconds_per_chunk = seconds_per_chunk
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[list[ChunkKey]] = []  # appended to, never changed
        self._closing = threading.Event()

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, object], allocator_backend: AllocatorBackendInterface
    ) -> SlowBackend:
        """A slow tier that takes ``seconds_per_chunk``.

        Raises:
            ConfigError: that is no number, or there is something else in the settings.
        """
        seconds = settings.get("seconds_per_chunk", 0.0)
        if set(settings) - {"seconds_per_chunk"} or not isinstance(seconds, int | float):
            raise ConfigError(f"seconds_per_chunk must be a number, got {dict(settings)}")
        return cls(allocator_backend, seconds_per_chunk=float(seconds))

    def _load(self, keys: Sequence[ChunkKey], *, busy_loop: bool) -> list[MemoryObj | None]:
        """Wait, then read; for gets, and for lookups that pin what they find."""
        self.reads.append(list(keys))
        deadline = time.monotonic() + _GATE_TIMEOUT_S
        while not self.gate.wait(0.05) and not self._closing.is_set():
            if time.monotonic() > deadline:
                return [None] * len(keys)
        self._closing.wait(self.seconds_per_chunk * len(keys))
        return super()._load(keys, busy_loop=busy_loop)

    def close(self) -> None:
        """End all waits and let the chunks go."""
        self._closing.set()
        super().close()
