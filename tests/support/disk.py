"""Disk tiers for tests: small budgets, one identity, and file systems that fail for real calls.

Callable from any thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from kvkeep.backends.base import AllocatorBackendInterface
from kvkeep.backends.disk.backend import DiskOptions, LocalDiskBackend
from kvkeep.backends.disk.directory import ROOT_NAME, chunk_name
from kvkeep.backends.disk.files import FileIO
from kvkeep.backends.disk.index import DiskEntry
from kvkeep.hashing import ChunkKey
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.metrics import Metrics
from kvkeep.policy.base import CachePolicy
from kvkeep.policy.names import create_policy

#: Identity under which :func:`make_disk` writes, unless the test gives another.
IDENTITY = CacheIdentity(
    model="test",
    revision="1",
    layout=KVLayout(
        fmt=MemoryFormat.OPAQUE_PAGES,
        dtype="uint8",
        page_size=1,
        groups=(GroupLayout("full", 3, 16),),
        num_kv_heads=0,
        head_size=0,
        engine="test",
    ),
    chunk_size=4,
)
#: A small budget that holds a few hundred of the contract's chunks.
BUDGET_BYTES = 1 << 20


def make_disk(
    pool: AllocatorBackendInterface,
    path: Path,
    *,
    policy: str = "lru",
    metrics: Metrics | None = None,
    identity: CacheIdentity = IDENTITY,
    io: FileIO | None = None,
    **options: int | float,
) -> LocalDiskBackend:
    """A disk tier over ``path``; ``options`` are fields of DiskOptions."""
    chosen = DiskOptions(
        path,
        BUDGET_BYTES,
        threads=2,
        load_timeout_s=5.0,
        lookup_timeout_s=5.0,
        open_timeout_s=30.0,  # tests do not go on without it, however busy the machine is
    )
    return LocalDiskBackend(
        replace(chosen, **options),  # type: ignore[arg-type]
        identity=identity,
        allocator_backend=pool,
        policy=cast("CachePolicy[DiskEntry]", create_policy(policy)),
        metrics=metrics if metrics is not None else Metrics(),
        io=io,
    )


def chunk_path(path: Path, key: ChunkKey) -> Path:
    """Where the disk tier over ``path`` keeps a chunk."""
    return path / ROOT_NAME / "chunks" / chunk_name(key)


def chunk_files(path: Path) -> list[Path]:
    """Every chunk file of the disk tier over ``path``."""
    return sorted((path / ROOT_NAME / "chunks").rglob("*.kvc"))


def file_bytes(path: Path) -> int:
    """Bytes of all files below ``path``, each in whole blocks of 4,096, as the budget counts."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                size = os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
            total += -(-size // 4096) * 4096
    return total


class FaultyIO(FileIO):
    """Real system calls, in pieces if wanted, unless ``before`` raises or stalls."""

    def __init__(self, *, piece: int | None = None) -> None:
        """Without faults.

        Args:
            piece: most bytes that one read or write moves.
        """
        self.before: Callable[[str], None] = lambda operation: None
        self._piece = piece
        self._lock = threading.Lock()
        self.calls: dict[str, int] = {}  # guarded by _lock

    def _note(self, operation: str) -> None:
        with self._lock:
            self.calls[operation] = self.calls.get(operation, 0) + 1
        self.before(operation)

    def _cut(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        return buffers if self._piece is None else [buffers[0][: self._piece]]

    def open_read(self, path: Path | str) -> int:
        """Open, or fail."""
        self._note("open_read")
        return super().open_read(path)

    def open_new(self, path: Path) -> int:
        """Create, or fail."""
        self._note("open_new")
        return super().open_new(path)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read, at most a piece."""
        self._note("read")
        return super().read(fd, self._cut(buffers), offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write, at most a piece."""
        self._note("write")
        return super().write(fd, self._cut(buffers), offset)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, or fail."""
        self._note("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        """Unlink, or fail."""
        self._note("unlink")
        super().unlink(path)
