"""What the processes of the disk's kill and sharing tests do. Each runs in a process of its own.

The bytes of a chunk follow from its key, so that any process can tell a wrong hit.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from kvkeep.backends.base import PutOutcome
from kvkeep.backends.disk.backend import LocalDiskBackend
from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.hashing import ChunkKey
from kvkeep.layout import GroupLayout, MemoryFormat
from kvkeep.memory.base import MemoryObj, References
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.classic import LRUPolicy
from kvkeep.testing.chunks import make_key, wait_until
from support.disk import IDENTITY, FaultyIO, chunk_path, make_disk

#: Shape and size of the chunks that these processes write.
SHAPE = (1, 4, 16384)
CHUNK_BYTES = 65536
#: Chunks that the directory has room for, and chunks that there are.
ROOM, UNIVERSE = 24, 80
BUDGET_BYTES = 4096 + ROOM * (CHUNK_BYTES + 4096)


CHURN_IDENTITY = replace(
    IDENTITY, layout=replace(IDENTITY.layout, groups=(GroupLayout("full", 1, 16384),))
)


def content(key: ChunkKey) -> bytes:
    """The bytes that belong to a key."""
    return np.random.default_rng(int.from_bytes(key[:8], "little")).bytes(CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Rig:
    """A pool and a disk tier over it."""

    pool: LocalCPUBackend
    disk: LocalDiskBackend
    metrics: Metrics

    def allocate(self, keys: Sequence[ChunkKey]) -> list[MemoryObj]:
        """Objects with the bytes of their keys; as many as there is memory for."""
        objs: list[MemoryObj] = []
        for key in keys:
            obj = self.pool.allocate(SHAPE, torch.uint8, MemoryFormat.OPAQUE_PAGES, busy_loop=False)
            if obj is None:
                break
            obj.array[:] = np.frombuffer(content(key), np.uint8)
            objs.append(obj)
        return objs

    def put(self, keys: Sequence[ChunkKey]) -> list[PutOutcome]:
        """Hand chunks to the disk."""
        with References(self.allocate(keys)) as held:
            count = len(held.objects)
            return self.disk.batched_submit_put_task(keys[:count], held.objects)

    def read(self, keys: Sequence[ChunkKey]) -> tuple[int, int]:
        """How many chunks were found, and how many of them have other bytes than they should."""
        found = wrong = 0
        for start in range(0, len(keys), 16):
            some = keys[start : start + 16]
            objs = self.disk.batched_get_blocking(some)
            with References(objs):
                for key, obj in zip(some, objs, strict=True):
                    if obj is not None:
                        found += 1
                        wrong += obj.array.tobytes() != content(key)
        return found, wrong


@contextmanager
def rig(path: Path, *, piece: int | None = None) -> Iterator[Rig]:
    """A pool of 64 chunks and a disk tier, closed at the end."""
    metrics = Metrics()
    allocator = initialize_allocator(64 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
    pool = LocalCPUBackend(allocator, LRUPolicy(), metrics=metrics)
    disk = make_disk(
        pool,
        path,
        metrics=metrics,
        io=FaultyIO(piece=piece),
        identity=CHURN_IDENTITY,
        size_bytes=BUDGET_BYTES,
        queue_bytes=16 * CHUNK_BYTES,
    )
    try:
        yield Rig(pool, disk, metrics)
    finally:
        disk.close()
        pool.close()


def churn(path: Path, seed: int, ready: Connection) -> None:
    """Write, evict, read, remove and rewrite until somebody kills this process."""
    chance = random.Random(seed)
    keys = [make_key(number) for number in range(UNIVERSE)]
    with rig(path, piece=8192) as it:
        ready.send(it.disk.health().healthy)
        while True:
            some = chance.sample(keys, 4)
            action = chance.randrange(8)
            if action < 5:
                it.put(some)
                it.disk.flush(5.0)
            elif action < 7:
                found, wrong = it.read(some)
                if wrong:
                    ready.send(f"{wrong} of {found} chunks are wrong")
            else:
                it.disk.batched_remove(some[:2])


def store_own(path: Path, name: str, count: int, pipe: Connection) -> None:
    """Store chunks of this process's own, report, then read the chunks it is told to read.

    Messages: sends "ready", then the number of chunks stored after all of them, then for every
    list of names it receives the pair (found, wrong), until it receives None.
    """
    with rig(path) as it:
        pipe.send("ready")
        pipe.recv()
        stored = 0
        for number in range(0, count, 4):
            keys = [make_key((name, index)) for index in range(number, min(number + 4, count))]
            stored += it.put(keys).count(PutOutcome.STORED)
            it.disk.flush(10.0)
        pipe.send(stored)
        while True:
            wanted = pipe.recv()
            if wanted is None:
                return
            pipe.send(it.read([make_key(key) for key in wanted]))


def forbidden_places(path: Path, pipe: Connection) -> None:
    """Take rights away from the files of a disk tier, and report what it then does.

    The super-user may do everything, so a process of the super-user becomes another user first.
    """
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    one, two = make_key("one"), make_key("two")
    seen: dict[str, object] = {}
    with rig(path) as it:
        it.put([one, two])
        it.disk.flush(10.0)
        chunk_path(path, one).chmod(0)
        seen["forbidden file"] = it.read([one, two])
        seen["its cause"] = it.metrics.snapshot().get(
            'kvkeep_failures_total{tier="LocalDiskBackend",operation="get",cause="permission"}'
        )
        chunk_path(path, one).chmod(0o600)
    temps = path / ROOT_NAME / "tmp"
    with rig(path) as it:
        temps.chmod(0o500)
        it.put([make_key("three")])
        it.disk.flush(10.0)
        seen["forbidden directory, read"] = it.read([one, two])
        seen["forbidden directory, stored"] = it.read([make_key("three")])[0]
        temps.chmod(0o700)
    (path / ROOT_NAME).chmod(0)
    with rig(path) as it:
        seen["forbidden tree, healthy"] = it.disk.health().healthy
        (path / ROOT_NAME).chmod(0o700)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: it.disk.health().healthy)
        seen["allowed again, healthy"] = it.disk.health().healthy
        seen["allowed again"] = it.read([one, two])
    pipe.send(seen)
