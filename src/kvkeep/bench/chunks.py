"""Chunks of random bytes in a pool, for measuring tiers. One thread, unless a method says so."""

from __future__ import annotations

import os
from types import TracebackType

import numpy as np
import torch

from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.codec.frame import ChunkMeta
from kvkeep.identity import CacheIdentity
from kvkeep.keys import KEY_BYTES, ChunkKey
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.factory import initialize_allocator
from kvkeep.memory.ownership import References
from kvkeep.metrics import Metrics
from kvkeep.policy.lru import LRUPolicy


class TierChunks:
    """A pool with room for ``count`` chunks twice: to write, and to read into.

    Attributes:
        keys: their names, random, so that no other run has the same.
        objs: the chunks.
        identity: that they belong to; likewise.
        pool: whose memory they lie in.
        meta: what one of them is.
    """

    def __init__(self, chunk_bytes: int, count: int) -> None:
        """All memory is committed, so that nothing is for the first time when it is measured."""
        self.chunk_bytes = chunk_bytes
        self._shape = (1, 1, chunk_bytes)
        layout = KVLayout(
            MemoryFormat.OPAQUE_PAGES,
            "uint8",
            1,
            (GroupLayout("full", 1, chunk_bytes),),
            0,
            0,
            "benchmark",
        )
        self.identity = CacheIdentity("benchmark", os.urandom(16).hex(), layout, chunk_size=1)
        self.meta = ChunkMeta(MemoryFormat.OPAQUE_PAGES, "uint8", self._shape)
        self.keys = [ChunkKey(os.urandom(KEY_BYTES)) for _ in range(count)]
        allocator = initialize_allocator(2 * count * chunk_bytes, chunk_bytes=chunk_bytes)
        self.pool = LocalCPUBackend(allocator, LRUPolicy(), metrics=Metrics())
        self.objs = self.allocate(count)
        chance = np.random.default_rng(1)
        for obj in self.objs:
            obj.array[:] = chance.integers(0, 256, chunk_bytes, dtype=np.uint8)
        References(self.allocate(count)).release()

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks."""
        return len(self.keys) * self.chunk_bytes

    def allocate(self, count: int) -> list[MemoryObj]:
        """Memory for ``count`` chunks.

        Raises:
            MemoryError: there is none.
        """
        objs = self.pool.batched_allocate(
            self._shape, torch.uint8, count, MemoryFormat.OPAQUE_PAGES
        )
        if objs is None:
            raise MemoryError(f"no room for {count} chunks of {self.chunk_bytes} bytes")
        return objs

    def close(self) -> None:
        """Give all memory back."""
        References(self.objs).release()
        self.pool.close()

    def __enter__(self) -> TierChunks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
