"""A CacheEngine over paged tensors in this process, whose parts can be measured. One thread.

Chunks of random bytes in a pool, for measuring tiers. One thread, unless a method says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.codec.frame import ChunkMeta
from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.engine.engine import CacheEngine
from kvkeep.gpu.base import GPUConnectorInterface, KVCaches
from kvkeep.gpu.dense import DenseGPUConnector
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.hashing import KEY_BYTES, ChunkKey
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.memory.allocators import PoolAllocator
from kvkeep.memory.base import MemoryObj, References
from kvkeep.memory.factory import initialize_allocator, tensor_pool
from kvkeep.metrics import Metrics
from kvkeep.policy.classic import LRUPolicy
from kvkeep.tokens import ChunkedTokenDatabase


@dataclass
class Made:
    """An engine with caches of its own.

    Attributes:
        engine: the engine under test.
        identity: of its chunks.
        caches: one tensor per layer, dim 0 is the page; a pair of tensors where they are dense.
        page_size: tokens in a page.
        order: shuffled page numbers; token t lies in page ``order[t // page_size]``.
        pool: where chunks of the CPU tier are.
    """

    engine: CacheEngine
    identity: CacheIdentity
    caches: KVCaches
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
    copy_threads: int = 1,
) -> Iterator[Made]:
    """An engine of opaque pages whose pool holds ``num_chunks`` chunks.

    As under vLLM, the caches are registered before anybody has touched them; here they are touched
    at once.

    Args:
        num_chunks: chunks in the pool and in the caches.
        num_layers: layers.
        page_bytes: bytes of a page in one layer.
        chunk_size: tokens in a chunk.
        page_size: tokens in a page.
        extra_pages: size of the engine's caches relative to the pool.
        copy_threads: threads that copy.
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
    num_pages = int(num_chunks * chunk_size // page_size * extra_pages)
    # one block, which the system maps afresh: smaller ones may lie in memory that was used before
    memory = torch.zeros((num_layers, num_pages, page_bytes), dtype=torch.uint8)
    caches = list(memory.unbind(0))
    connector = PagedGPUConnector(layout, copy_threads=copy_threads, huge_pages=True)
    connector.register_kv_caches(caches)
    for layer, cache in enumerate(caches):
        cache.fill_(layer + 1)
    with engine_over(layout, connector, caches, num_chunks, chunk_size) as made:
        yield made


@contextmanager
def make_dense_engine(
    *,
    num_chunks: int,
    num_layers: int,
    dtype: str,
    heads: tuple[int, int] = (8, 128),
    heads_first: bool = False,
    chunk_size: int = 256,
    copy_threads: int = 1,
) -> Iterator[Made]:
    """An engine of dense caches, K and V of each layer, whose pool holds ``num_chunks`` chunks.

    Args:
        num_chunks: chunks in the pool and in the caches.
        num_layers: layers.
        dtype: name of the element type.
        heads: KV heads, and elements of each.
        heads_first: tokens of a head are neighbours, as under transformers; else heads of a token.
        chunk_size: tokens in a chunk.
        copy_threads: threads that copy.
    """
    item: torch.dtype = getattr(torch, dtype)
    num_heads, size = heads
    group = GroupLayout("full", num_layers, 2 * num_heads * size * item.itemsize)
    layout = KVLayout(MemoryFormat.KV_2LTD, dtype, 1, (group,), num_heads, size, "benchmark")
    num_tokens = num_chunks * chunk_size
    shape = (num_heads, num_tokens, size) if heads_first else (num_tokens, num_heads, size)
    caches = []
    for layer in range(num_layers):
        memory = torch.full((2, *shape), layer + 1, dtype=torch.uint8).to(item)
        pair = tuple(part.transpose(0, 1) if heads_first else part for part in memory)
        caches.append((pair[0], pair[1]))
    connector = DenseGPUConnector(layout, copy_threads=copy_threads)
    connector.register_kv_caches(caches)
    with engine_over(layout, connector, caches, num_chunks, chunk_size) as made:
        yield made


@contextmanager
def engine_over(
    layout: KVLayout,
    connector: GPUConnectorInterface,
    caches: Sequence[torch.Tensor] | Sequence[tuple[torch.Tensor, torch.Tensor]],
    num_chunks: int,
    chunk_size: int = 256,
) -> Iterator[Made]:
    """An engine over caches that are registered with ``connector`` already.

    Args:
        layout: of the caches.
        connector: moves them.
        caches: of every layer.
        num_chunks: chunks in the pool.
        chunk_size: tokens in a chunk.
    """
    identity = CacheIdentity("benchmark", "1", layout, chunk_size=chunk_size)
    size = num_chunks * layout.chunk_bytes(chunk_size)
    settings = load_settings(
        extra={"chunk_size": chunk_size, "cpu.size": f"{size}B", "cpu.prefault": "0B"}
    )
    first = caches[0]
    num_pages = len(first if isinstance(first, torch.Tensor) else first[0])
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
    with CacheManager.create(settings, identity, connector) as manager:
        cpu = manager.storage.allocator_backend
        if not isinstance(cpu, LocalCPUBackend):
            raise TypeError(f"expected a LocalCPUBackend, got {type(cpu).__name__}")
        pool = tensor_pool(cpu.allocator)
        yield Made(manager.engine, identity, caches, layout.page_size, order, pool)


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
