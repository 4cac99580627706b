"""Spec 14.1 and 14.2: keys for a long prompt, and the lookup of one that is stored whole.

Spec 14.4: stores into a pool that is a tenth of what passes through it.

Spec 14.3: store and retrieve of KV beside a memcpy of as many bytes in as many threads.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.bench.measure import Row, pairs, rate_row, seconds, time_row
from kvkeep.bench.rig import Made, make_dense_engine, make_engine
from kvkeep.hashing import TOKEN_BYTES, ChunkKey, chain_full_chunks
from kvkeep.memory.placement import advise_huge_pages
from kvkeep.tokens import ChunkedTokenDatabase

NUM_TOKENS = 131_072
CHUNK = 256
STEP = CHUNK * TOKEN_BYTES
#: Turns of a chat that ends with NUM_TOKENS tokens.
CHAT_TURNS = 50


def plain_chain(data: bytes) -> bytes:
    """The limit: a chained sha256 over the same bytes, and nothing else."""
    parent = bytes(32)
    sha256 = hashlib.sha256
    for start in range(0, len(data), STEP):
        parent = sha256(parent + data[start : start + STEP]).digest()
    return parent


def run_keys(repeats: int) -> list[Row]:
    """Rows for keys and lookups."""
    ids = [(index * 7919) % 50_000 for index in range(NUM_TOKENS)]
    with make_engine(
        num_chunks=NUM_TOKENS // CHUNK, chunk_size=CHUNK, num_layers=1, page_bytes=64
    ) as made:
        made.fill(ids)
        rows = [*_key_rows(made, ids, repeats), *_lookup_rows(made, ids, repeats)]
        return [*rows, *_chat_rows(made, ids, repeats)]


def _key_rows(made: Made, ids: list[int], repeats: int) -> list[Row]:
    flat = np.array(ids, dtype=np.int64)
    data = array("I", ids).tobytes()
    grown = [*ids, *range(CHUNK)]

    database = ChunkedTokenDatabase(made.identity)
    database.process_tokens([1])  # makes the root, once for an engine

    def fresh(tokens: object) -> None:
        database.forget()
        database.process_tokens(tokens)

    def plain() -> bytes:
        return plain_chain(array("I", ids).tobytes())

    cases: list[tuple[str, Callable[[], object], Callable[[], object], float | None]] = [
        ("keys of 131,072 ids, a list", lambda: fresh(ids), plain, 1.3),
        (
            "keys of 131,072 ids, an array",
            lambda: fresh(flat),
            lambda: plain_chain(data),
            1.5,
        ),
        (
            "keys of a prompt that grew by a chunk",
            lambda: made.tokens.process_tokens(grown),
            plain,
            None,
        ),
    ]
    return [
        time_row(what, pairs(ours, limit, repeats=repeats), target=target)
        for what, ours, limit, target in cases
    ]


def _lookup_rows(made: Made, ids: list[int], repeats: int) -> list[Row]:
    engine = made.engine

    def keys_alone() -> None:
        ChunkedTokenDatabase(made.identity).process_tokens(ids)

    def cold_lookup() -> None:
        made.forget_keys()
        if engine.lookup(ids) != NUM_TOKENS:
            raise RuntimeError("the prompt is not stored whole")

    def cold_pinned() -> None:
        made.forget_keys()
        engine.lookup(ids, lookup_id="bench", pin=True)
        engine.lookup_unpin("bench")

    return [
        time_row(
            "lookup, 512 chunks (keys + 0.3 ms)",
            pairs(cold_lookup, keys_alone, repeats=repeats),
            target=1.0,
            extra_ms=0.3,
        ),
        time_row(
            "with pin and release (keys + 1 ms)",
            pairs(cold_pinned, keys_alone, repeats=repeats),
            target=1.0,
            extra_ms=1.0,
        ),
    ]


def _chat_rows(made: Made, ids: list[int], repeats: int) -> list[Row]:
    """A chat whose prompt grows turn by turn: each turn is asked for, each token hashed once."""
    turns = [ids[: NUM_TOKENS * turn // CHAT_TURNS] for turn in range(1, CHAT_TURNS + 1)]

    def chat() -> None:
        database = ChunkedTokenDatabase(made.identity)
        for turn in turns:
            database.process_tokens(turn)

    def once() -> None:
        for turn in turns:
            array("I", turn)
        plain_chain(array("I", ids).tobytes())

    hashed = [0]

    def counted(parent: bytes, data: bytes, chunk_size: int) -> list[ChunkKey]:
        hashed[0] += len(data) // STEP * STEP
        return chain_full_chunks(parent, data, chunk_size)

    with mock.patch("kvkeep.hashing.chain_full_chunks", counted):
        chat()
    what = f"keys of a chat of {CHAT_TURNS} turns"
    whole = NUM_TOKENS * TOKEN_BYTES
    return [
        time_row(what, pairs(chat, once, repeats=repeats), target=1.3),
        Row(f"{what}, hashed", hashed[0] / 1e6, whole / 1e6, "MB", hashed[0] / whole, 1.0),
    ]


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


def run_copies(repeats: int, sizes: Sequence[tuple[int, int]]) -> list[Row]:
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


#: Tokens of a prompt, and how many prompts the pool holds.
PROMPT_TOKENS, POOL_PROMPTS = 2048, 4
#: Prompts in turn, as many tokens as ten pools hold.
PROMPTS = 10 * POOL_PROMPTS
PAGE_TOKENS = 32


def run_eviction(repeats: int) -> list[Row]:
    """The rate of stores that evict, beside that of stores into an emptied pool."""
    prompts = [
        [(index * 7919 + number) % 50_000 for index in range(PROMPT_TOKENS)]
        for number in range(PROMPTS)
    ]
    num_bytes = POOL_PROMPTS * PROMPT_TOKENS * NUM_LAYERS * TOKEN_LAYER_BYTES
    with make_engine(
        num_chunks=POOL_PROMPTS * PROMPT_TOKENS // 256,
        num_layers=NUM_LAYERS,
        page_bytes=PAGE_TOKENS * TOKEN_LAYER_BYTES,
        page_size=PAGE_TOKENS,
    ) as made:
        slots = made.slots(PROMPT_TOKENS)
        turn = 0

        def store(some: list[list[int]]) -> None:
            for ids in some:
                done = made.engine.store(ids, kvcaches=None, slot_mapping=slots)
                if done.num_copied_tokens != PROMPT_TOKENS:
                    raise RuntimeError(f"the prompt was not stored: {done}")

        def next_prompts() -> list[list[int]]:
            nonlocal turn
            turn += 1
            first = turn * POOL_PROMPTS % PROMPTS
            return prompts[first : first + POOL_PROMPTS]

        measured = []
        for round_number in range(repeats + 1):
            store(next_prompts())  # the pool is full
            gc.collect()
            evicting_s = seconds(lambda: store(next_prompts()))
            made.engine.clear()
            gc.collect()
            emptied_s = seconds(lambda: store(next_prompts()))
            if round_number:  # the first round touches the pool
                measured.append((evicting_s, emptied_s))
        what = "stores that evict (limit: that do not)"
        return [rate_row(what, measured, num_bytes, target=0.9)]
