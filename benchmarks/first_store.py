"""What the first touch of pool memory costs a store, with and without committing it ahead.

Each turn makes three engines of the same size: one whose pool nobody has touched, one whose pool
was committed ahead in the background (``cpu.prefault``), and one that stores for the second time.

Use: ``python benchmarks/first_store.py [--tokens 1024] [--turns 5]``. Prints milliseconds and the
ratio to the second store, medians of the turns.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from kvkeep.bench.engine import NUM_LAYERS, TOKEN_LAYER_BYTES
from kvkeep.bench.measure import machine, seconds
from kvkeep.bench.rig import Made, make_engine
from kvkeep.memory.allocators import PagedAllocator
from kvkeep.memory.prefault import Prefaulter

#: How long the background thread may take before the store begins.
WAIT_S = 60.0


def store_ms(made: Made, ids: list[int], slots: torch.Tensor) -> float:
    """One store of the whole prompt."""

    def store() -> None:
        if made.engine.store(ids, kvcaches=None, slot_mapping=slots).num_tokens != len(ids):
            raise RuntimeError("the prompt was not stored whole")

    return seconds(store) * 1e3


@contextmanager
def committed(made: Made, num_bytes: int) -> Iterator[None]:
    """The pool's first ``num_bytes`` are committed, as the background thread does it."""
    if not isinstance(made.pool, PagedAllocator):
        raise TypeError(f"expected equal slots, got {made.pool}")
    prefaulter = Prefaulter(made.pool, ahead_bytes=num_bytes)
    pause = threading.Event()
    deadline = time.monotonic() + WAIT_S
    while prefaulter.committed < num_bytes and time.monotonic() < deadline:
        pause.wait(0.01)
    yield
    prefaulter.close()


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt, a multiple of 256.")] = 1024,
    turns: Annotated[int, typer.Option(help="Turns; the median counts.")] = 5,
) -> None:
    """Measure."""
    torch.set_num_threads(1)
    ids = [(index * 7919) % 50_000 for index in range(tokens)]
    num_bytes = tokens * NUM_LAYERS * TOKEN_LAYER_BYTES
    times: dict[str, list[float]] = {"fresh": [], "committed ahead": [], "second": []}
    for _ in range(turns):
        for kind in ("fresh", "committed ahead"):
            with make_engine(
                num_chunks=tokens // 256,
                num_layers=NUM_LAYERS,
                page_bytes=16 * TOKEN_LAYER_BYTES,
            ) as made:
                slots = made.slots(tokens)
                with nullcontext() if kind == "fresh" else committed(made, num_bytes):
                    times[kind].append(store_ms(made, ids, slots))
                made.engine.clear()
                if kind == "fresh":
                    times["second"].append(store_ms(made, ids, slots))
    second = statistics.median(times["second"])
    table = Table(title=f"store of {tokens:,} tokens, {num_bytes / 2**20:.0f} MiB")
    for name in ("pool memory", "ms", "ratio to the second store"):
        table.add_column(name, justify="right")
    for kind, values in times.items():
        median = statistics.median(values)
        table.add_row(kind, f"{median:.1f}", f"{median / second:.2f}")
    console = Console()
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    typer.run(main)
