"""A CacheEngine over paged tensors in this process, whose parts can be measured. One thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.config import load_settings
from kvkeep.engine import CacheEngine
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.manager import CacheManager
from kvkeep.memory.factory import tensor_pool
from kvkeep.memory.pool import PoolAllocator
from kvkeep.tokens import ChunkedTokenDatabase


@dataclass
class Made:
    """An engine with caches of its own.

    Attributes:
        engine: the engine under test.
        identity: of its chunks.
        caches: one tensor per layer, dim 0 is the page.
        page_size: tokens in a page.
        order: shuffled page numbers; token t lies in page ``order[t // page_size]``.
        pool: where chunks of the CPU tier are.
    """

    engine: CacheEngine
    identity: CacheIdentity
    caches: list[torch.Tensor]
    page_size: int
    order: torch.Tensor
    pool: PoolAllocator

    @property
    def tokens(self) -> ChunkedTokenDatabase:
        """The engine's token database."""
        database = self.engine.token_database
        if not isinstance(database, ChunkedTokenDatabase):
            raise TypeError(f"expected a ChunkedTokenDatabase, got {type(database).__name__}")
        return database

    def slots(self, num_tokens: int) -> torch.Tensor:
        """Slot of each of the first ``num_tokens`` tokens, int64."""
        pages = self.order[: -(-num_tokens // self.page_size)]
        slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
        return slots.reshape(-1)[:num_tokens].contiguous()

    def fill(self, ids: list[int]) -> None:
        """Store a whole prompt."""
        self.engine.store(ids, kvcaches=None, slot_mapping=self.slots(len(ids)))

    def forget_keys(self) -> None:
        """Make the token database hash from the start again."""
        self.tokens.forget()


@contextmanager
def make_engine(
    *,
    num_chunks: int,
    num_layers: int,
    page_bytes: int,
    chunk_size: int = 256,
    page_size: int = 16,
    extra_pages: float = 1.0,
) -> Iterator[Made]:
    """An engine whose pool holds ``num_chunks`` chunks, all of its memory touched.

    Args:
        num_chunks: chunks in the pool and in the caches.
        num_layers: layers.
        page_bytes: bytes of a page in one layer.
        chunk_size: tokens in a chunk.
        page_size: tokens in a page.
        extra_pages: size of the engine's caches relative to the pool.
    """
    layout = KVLayout(
        MemoryFormat.OPAQUE_PAGES,
        "uint8",
        page_size,
        (GroupLayout("full", num_layers, page_bytes),),
        0,
        0,
        "benchmark",
    )
    identity = CacheIdentity("benchmark", "1", layout, chunk_size=chunk_size)
    num_pages = int(num_chunks * chunk_size // page_size * extra_pages)
    caches = [
        torch.full((num_pages, page_bytes), layer + 1, dtype=torch.uint8)
        for layer in range(num_layers)
    ]
    connector = PagedGPUConnector(layout)
    connector.register_kv_caches(caches)
    size = num_chunks * layout.chunk_bytes(chunk_size)
    settings = load_settings(
        extra={"chunk_size": chunk_size, "cpu.size": f"{size}B", "cpu.prefault": "0B"}
    )
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(num_pages, generator=generator)
    with CacheManager.create(settings, identity, connector) as manager:
        first = manager.storage.allocator_backend
        if not isinstance(first, LocalCPUBackend):
            raise TypeError(f"expected a LocalCPUBackend, got {type(first).__name__}")
        pool = tensor_pool(first.allocator)
        yield Made(manager.engine, identity, caches, page_size, order, pool)
