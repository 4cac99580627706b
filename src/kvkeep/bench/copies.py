"""Spec 14.3: store and retrieve of paged KV beside a memcpy of the same bytes, one thread each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from kvkeep.bench.measure import Row, pairs, rate_row
from kvkeep.bench.rig import Made, make_engine

NUM_LAYERS = 32
#: K and V of one token in one layer: 8 KV heads, head size 128, two bytes.
TOKEN_LAYER_BYTES = 2 * 8 * 128 * 2


class Memcpy:
    """A plain memcpy between two touched buffers."""

    def __init__(self, num_bytes: int) -> None:
        """Two buffers of ``num_bytes``."""
        self.num_bytes = num_bytes
        self._from = np.ones(num_bytes, np.uint8)
        self._to = np.ones(num_bytes, np.uint8)

    def __call__(self) -> None:
        """Copy once."""
        ctypes.memmove(self._to.ctypes.data, self._from.ctypes.data, self.num_bytes)


def cases(
    made: Made, ids: list[int]
) -> list[tuple[str, Callable[[], object], Callable[[], object] | None]]:
    """(name, call, what must run before it) of the four ways to move a prompt."""
    engine, slots = made.engine, made.slots(len(ids))

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


def run(repeats: int, sizes: list[tuple[int, int]]) -> list[Row]:
    """Rows for each (tokens, page size)."""
    rows = []
    for num_tokens, page_size in sizes:
        ids = [(index * 7919) % 50_000 for index in range(num_tokens)]
        page_bytes = page_size * TOKEN_LAYER_BYTES
        with make_engine(
            num_chunks=num_tokens // 256,
            num_layers=NUM_LAYERS,
            page_bytes=page_bytes,
            page_size=page_size,
            extra_pages=1.5,
        ) as made:
            num_bytes = num_tokens * NUM_LAYERS * TOKEN_LAYER_BYTES
            limit = Memcpy(num_bytes)
            for name, call, before in cases(made, ids):
                measured = pairs(call, limit, repeats=repeats, before=before)
                what = f"{name}, {num_tokens:,} tokens, page {page_size}"
                rows.append(rate_row(what, measured, num_bytes, target=0.85))
    return rows
