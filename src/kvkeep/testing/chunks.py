"""Chunks for tests of backends: keys, the bytes that belong to them, a small pool.

The bytes of a chunk follow from its key, so that a test can tell a wrong hit wherever it happens.
Callable from any thread.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    PutOutcome,
    StorageBackendInterface,
)
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.hashing import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj, References
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.classic import LRUPolicy

#: Shape and dtype of the chunks that the contract stores.
SHAPE = (3, 4, 16)
DTYPE = torch.uint8
CHUNK_BYTES = 192
#: Chunks that the pool has room for.
CAPACITY = 64
#: How long a put may take to become readable, and a call from another thread to return.
WAIT_S = 20.0


def make_key(name: object) -> ChunkKey:
    """A key with a name."""
    return ChunkKey(hashlib.sha256(str(name).encode()).digest())


def make_keys(count: int, first: int = 0) -> list[ChunkKey]:
    """Keys of the chunks ``first`` to ``first + count - 1``."""
    return [make_key(number) for number in range(first, first + count)]


def bytes_of(key: ChunkKey) -> bytes:
    """The bytes that belong to a key: no two keys share them."""
    return (key * (CHUNK_BYTES // len(key) + 1))[:CHUNK_BYTES]


def make_pool(capacity: int = CAPACITY, metrics: Metrics | None = None) -> LocalCPUBackend:
    """A pool with room for so many chunks, whose allocations wait two seconds at most."""
    allocator = initialize_allocator(capacity * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
    return LocalCPUBackend(
        allocator, LRUPolicy(), metrics=metrics or Metrics(), alloc_timeout_s=2.0
    )


def fill(pool: AllocatorBackendInterface, keys: Sequence[ChunkKey]) -> list[MemoryObj]:
    """Objects with the bytes of ``keys``, one reference each."""
    objs = pool.batched_allocate(
        SHAPE, DTYPE, len(keys), MemoryFormat.OPAQUE_PAGES, busy_loop=False
    )
    assert objs is not None, "the test's pool is full"
    for key, obj in zip(keys, objs, strict=True):
        obj.array[:] = np.frombuffer(bytes_of(key), np.uint8)
    return objs


def put(
    backend: StorageBackendInterface, pool: LocalCPUBackend, keys: Sequence[ChunkKey]
) -> list[PutOutcome]:
    """Put chunks with their own bytes and wait until they can be read."""
    readable: set[ChunkKey] = set()
    changed = threading.Condition()

    def on_complete(key: ChunkKey) -> None:
        with changed:
            readable.add(key)
            changed.notify_all()

    with References(fill(pool, keys)) as objs:
        outcomes = backend.batched_submit_put_task(keys, objs.objects, on_complete=on_complete)
    pairs = zip(keys, outcomes, strict=True)
    expected = {key for key, outcome in pairs if outcome is PutOutcome.STORED}
    with changed:
        assert changed.wait_for(lambda: readable >= expected, WAIT_S), "a put never completed"
    return outcomes


def check_found(keys: Sequence[ChunkKey], objs: Sequence[MemoryObj | None]) -> list[bool]:
    """Check the bytes of what was found, give it back, and say which keys those are."""
    with References(objs):
        assert len(objs) == len(keys)
        for key, obj in zip(keys, objs, strict=True):
            assert obj is None or obj.array.tobytes() == bytes_of(key)
        return [obj is not None for obj in objs]


def wait_until(condition: Callable[[], bool], *, timeout_s: float = WAIT_S) -> None:
    """Wait for something that a backend or another process does in its own time."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        pause.wait(0.01)
