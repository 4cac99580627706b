"""Spec 14.3: store and retrieve of KV beside a memcpy of as many bytes in as many threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.bench.measure import Row, pairs, rate_row
from kvkeep.bench.rig import Made, make_dense_engine, make_engine
from kvkeep.memory.huge_pages import advise_huge_pages

NUM_LAYERS = 32
#: K and V of one token in one layer: 8 KV heads, head size 128, two bytes.
TOKEN_LAYER_BYTES = 2 * 8 * 128 * 2
#: Page size that stands for dense caches.
DENSE = 0
#: The ratio that spec 14.3 asks for.
TARGET = 0.85


@dataclass(frozen=True)
class CopyCase:
    """One shape of KV to move.

    Attributes:
        num_tokens: tokens of the prompt.
        page_size: tokens in a page, or DENSE.
        dtype: of the engine's KV.
        threads: that copy.
        heads_first: of dense caches: tokens of a head are neighbours, as under transformers.
    """

    num_tokens: int
    page_size: int
    dtype: str = "bfloat16"
    threads: int = 1
    heads_first: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        item: torch.dtype = getattr(torch, self.dtype)
        return TOKEN_LAYER_BYTES // 2 * item.itemsize

    @property
    def name(self) -> str:
        """What is moved, in words."""
        form = f"page {self.page_size}" if self.page_size else "dense"
        parts = [f"{self.num_tokens:,} tokens", form]
        if self.heads_first:
            parts.append("heads first")
        if self.dtype != "bfloat16":
            parts.append("fp8")
        if self.threads > 1:
            parts.append(f"{self.threads} threads")
        return ", ".join(parts)


class Memcpy:
    """A plain memcpy between two touched buffers."""

    def __init__(self, num_bytes: int, threads: int = 1) -> None:
        """Two buffers of ``num_bytes``, on huge pages where the system has them.

        Args:
            num_bytes: to copy.
            threads: each copies an equal part.
        """
        self.num_bytes = num_bytes
        self._threads = threads
        self._from = _touched(num_bytes)
        self._to = _touched(num_bytes)
        self._executor = ThreadPoolExecutor(threads) if threads > 1 else None

    def __call__(self) -> None:
        """Copy once."""
        if self._executor is None:
            self._copy(0, self.num_bytes)
            return
        bounds = [self.num_bytes * part // self._threads for part in range(self._threads + 1)]
        list(self._executor.map(self._copy, bounds, bounds[1:]))

    def _copy(self, start: int, end: int) -> None:
        to, source = self._to.ctypes.data + start, self._from.ctypes.data + start
        ctypes.memmove(to, source, end - start)


def _touched(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory whose pages the system has given: huge ones, if it gives any, as the pool has them."""
    memory = np.empty(num_bytes, np.uint8)
    advise_huge_pages({memory.ctypes.data: num_bytes})
    memory.fill(1)
    return memory


def cases(
    made: Made, ids: list[int]
) -> list[tuple[str, Callable[[], object], Callable[[], object] | None]]:
    """(name, call, what must run before it) of the four ways to move a prompt."""
    engine = made.engine
    slots = made.slots(len(ids)) if made.page_size > 1 else None

    def store() -> None:
        if engine.store(ids, kvcaches=None, slot_mapping=slots).num_tokens != len(ids):
            raise RuntimeError("the prompt was not stored whole")

    def load() -> None:
        if not bool(engine.retrieve(ids, kvcaches=None, slot_mapping=slots).all()):
            raise RuntimeError("the prompt was not loaded whole")

    def store_layers() -> None:
        for _ in engine.store_layer(ids, kvcaches=None, slot_mapping=slots):
            pass

    def load_layers() -> None:
        for _ in engine.retrieve_layer(ids, kvcaches=None, slot_mapping=slots):
            pass

    return [
        ("store", store, engine.clear),
        ("load", load, None),
        ("store layerwise", store_layers, engine.clear),
        ("load layerwise", load_layers, None),
    ]


@contextmanager
def opened(case: CopyCase) -> Iterator[Made]:
    """An engine whose pool holds exactly the prompt of ``case``."""
    num_chunks = case.num_tokens // 256
    if case.page_size == DENSE:
        with make_dense_engine(
            num_chunks=num_chunks,
            num_layers=NUM_LAYERS,
            dtype=case.dtype,
            heads_first=case.heads_first,
            copy_threads=case.threads,
        ) as made:
            yield made
        return
    with make_engine(
        num_chunks=num_chunks,
        num_layers=NUM_LAYERS,
        page_bytes=case.page_size * case.token_bytes,
        page_size=case.page_size,
        extra_pages=1.5,
        copy_threads=case.threads,
    ) as made:
        yield made


def run_cases(repeats: int, some: Sequence[CopyCase]) -> list[Row]:
    """Four rows for each case."""
    rows = []
    for case in some:
        ids = [(index * 7919) % 50_000 for index in range(case.num_tokens)]
        num_bytes = case.num_tokens * NUM_LAYERS * case.token_bytes
        limit = Memcpy(num_bytes, case.threads)
        with opened(case) as made:
            for name, call, before in cases(made, ids):
                measured = pairs(call, limit, repeats=repeats, before=before)
                rows.append(rate_row(f"{name}, {case.name}", measured, num_bytes, target=TARGET))
    return rows


def run(repeats: int, sizes: Sequence[tuple[int, int]]) -> list[Row]:
    """Rows for each (tokens, page size) in bfloat16, with one thread."""
    return run_cases(repeats, [CopyCase(tokens, page) for tokens, page in sizes])


#: The cases of spec 14.3.
MATRIX: tuple[CopyCase, ...] = (
    *(CopyCase(tokens, page) for tokens in (4096, 16384) for page in (16, 32, 128)),
    *(CopyCase(4096, page, "float8_e4m3fn") for page in (16, 32, 128)),
    CopyCase(16384, 16, "float8_e4m3fn"),
    *(CopyCase(4096, page, threads=2) for page in (16, 128)),
    CopyCase(16384, 16, threads=2),
    CopyCase(4096, DENSE),
    CopyCase(16384, DENSE),
    CopyCase(4096, DENSE, "float8_e4m3fn"),
    CopyCase(4096, DENSE, heads_first=True),
)
