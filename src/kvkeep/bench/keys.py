"""Spec 14.1 and 14.2: keys for a long prompt, and the lookup of one that is stored whole."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from unittest import mock

import numpy as np

from kvkeep.bench.measure import Row, pairs, time_row
from kvkeep.bench.rig import Made, make_engine
from kvkeep.keys import TOKEN_BYTES, ChunkKey, chain_full_chunks
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


def run(repeats: int) -> list[Row]:
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

    with mock.patch("kvkeep.chain_memo.chain_full_chunks", counted):
        chat()
    what = f"keys of a chat of {CHAT_TURNS} turns"
    whole = NUM_TOKENS * TOKEN_BYTES
    return [
        time_row(what, pairs(chat, once, repeats=repeats), target=1.3),
        Row(f"{what}, hashed", hashed[0] / 1e6, whole / 1e6, "MB", hashed[0] / whole, 1.0),
    ]
