"""Spec 14.4: stores into a pool that is a tenth of what passes through it."""

from __future__ import annotations

import gc

from kvkeep.bench.copies import NUM_LAYERS, TOKEN_LAYER_BYTES
from kvkeep.bench.measure import Row, rate_row, seconds
from kvkeep.bench.rig import make_engine

#: Tokens of a prompt, and how many prompts the pool holds.
PROMPT_TOKENS, POOL_PROMPTS = 2048, 4
#: Prompts in turn, as many tokens as ten pools hold.
PROMPTS = 10 * POOL_PROMPTS
PAGE_TOKENS = 32


def run(repeats: int) -> list[Row]:
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
