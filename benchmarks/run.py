"""`make bench`: prints one table and writes it to benchmarks/results/latest.json."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import bench_vllm
import typer
from rich.console import Console

from kvkeep.bench import copies, keys
from kvkeep.bench.measure import Row, save, show, use_one_thread

RESULTS = Path(__file__).parent / "results"


def main(
    repeats: Annotated[int, typer.Option(help="Pairs per row; the median counts.")] = 7,
    quick: Annotated[bool, typer.Option(help="Small sizes and no engine, to try it out.")] = False,
) -> None:
    """Measure kvkeep against this machine's limits."""
    console = Console()
    use_one_thread()
    rows: list[Row] = []
    sizes = [(4096, 16)] if quick else [(4096, 16), (4096, 32), (4096, 128), (16384, 16)]
    console.print("keys and lookups ...")
    rows += keys.run(repeats)
    console.print("copies in and out of paged KV ...")
    rows += copies.run(repeats, sizes)
    if not quick and importlib.util.find_spec("vllm") is not None:
        console.print("vLLM, with and without kvkeep ...")
        rows += bench_vllm.run(min(repeats, 5), [1024, 4096])
    show(rows, console)
    save(rows, RESULTS)
    console.print("written to benchmarks/results/latest.json")


if __name__ == "__main__":
    typer.run(main)
