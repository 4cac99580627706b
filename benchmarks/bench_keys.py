"""Spec 14.1 and 14.2: keys for a long prompt, and the lookup of one that is stored whole."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
from measure import Row, pairs, time_row
from pool import make_engine

from kvkeep.tokens import ChunkedTokenDatabase

NUM_TOKENS = 131_072
CHUNK = 256
STEP = CHUNK * 4


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
    flat = np.array(ids, dtype=np.int64)
    data = array("I", ids).tobytes()
    with make_engine(
        num_chunks=NUM_TOKENS // CHUNK, chunk_size=CHUNK, num_layers=1, page_bytes=64
    ) as made:
        identity = made.identity

        def fresh(tokens: object) -> None:
            ChunkedTokenDatabase(identity).process_tokens(tokens)

        rows = [
            time_row(
                "keys of 131,072 ids in a list",
                pairs(
                    lambda: fresh(ids),
                    lambda: plain_chain(array("I", ids).tobytes()),
                    repeats=repeats,
                ),
                target=1.3,
            ),
            time_row(
                "keys of 131,072 ids in a numpy array",
                pairs(lambda: fresh(flat), lambda: plain_chain(data), repeats=repeats),
                target=1.5,
            ),
        ]
        made.fill(ids)
        engine = made.engine
        grown = [*ids, *range(CHUNK)]
        rows.append(
            time_row(
                "keys of a known prompt that grew by one chunk",
                pairs(
                    lambda: made.tokens.process_tokens(grown),
                    lambda: plain_chain(array("I", ids).tobytes()),
                    repeats=repeats,
                ),
                target=None,
            )
        )

        def cold_lookup() -> None:
            made.forget_keys()
            if engine.lookup(ids) != NUM_TOKENS:
                raise RuntimeError("the prompt is not stored whole")

        def cold_pinned() -> None:
            made.forget_keys()
            engine.lookup(ids, lookup_id="bench", pin=True)
            engine.lookup_unpin("bench")

        rows.append(
            time_row(
                "lookup of 512 stored chunks (limit: keys + 0.3 ms)",
                pairs(cold_lookup, lambda: fresh(ids), repeats=repeats),
                target=1.0,
                extra_ms=0.3,
            )
        )
        rows.append(
            time_row(
                "the same with pin and release (limit: keys + 1 ms)",
                pairs(cold_pinned, lambda: fresh(ids), repeats=repeats),
                target=1.0,
                extra_ms=1.0,
            )
        )
    return rows
