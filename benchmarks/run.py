"""`make bench`: every figure of spec 14 in one table, section by section.

    make bench                     everything, in less than 20 minutes
    make bench ONLY=copies         one section, or several: ONLY=keys,eviction
    make bench ONLY=vllm LMCACHE_PYTHON=PATH/TO/python     LMCache beside kvkeep, see docs

Prints one table and writes it, with the machine's description, to ``benchmarks/results``: each
section to a file of its own, and a full run to ``latest.json``, too. What a section needs and this
machine has not (vLLM, a store's server) is left out, and said so.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kvkeep.bench import engine
from kvkeep.bench.measure import Row, save, show

RESULTS = Path(__file__).parent / "results"
#: Plot of the section ``scale``.
SCALE_PLOT = Path(__file__).parents[1] / "docs" / "images" / "scale.png"
#: Stores of the section ``remote``, and the share of the plain client's rate that is asked for.
STORES, REMOTE_TARGET = ("redis", "unix", "s3", "mooncake", "file"), 0.9
#: Chunks of 4 MiB that a round puts and gets: the fastest store takes some tens of milliseconds.
REMOTE_CHUNKS = 64


def disk_rows(repeats: int) -> list[Row]:
    """Spec 14.5 and 14.6."""
    import disk_limits

    folder = Path(tempfile.gettempdir())
    rows = disk_limits.measure_files(folder, 4096, 512, threads=4, rounds=repeats)
    return rows + disk_limits.measure_store(folder, 4096, rounds=repeats)


def remote_rows(repeats: int) -> list[Row]:
    """Remote stores beside their client libraries."""
    import remote

    from support.servers.process import ServerError

    rows = []
    for kind in STORES:
        bench = remote.Bench(4 << 20, REMOTE_CHUNKS, 4)
        try:
            rounds = bench.run(kind, repeats)
        except (ServerError, ImportError) as error:
            Console(stderr=True).print(f"{kind} is left out: {error}")
            continue
        finally:
            bench.close()
        for verb, plain, tier in (("put", 0, 2), ("get", 1, 3)):
            ours = statistics.median(one[tier] for one in rounds)
            limit = statistics.median(one[plain] for one in rounds)
            ratio = statistics.median(one[tier] / one[plain] for one in rounds)
            what = f"{kind}: {verb} / the client library"
            rows.append(Row(what, ours, limit, "GB/s", ratio, REMOTE_TARGET))
    return rows


def scale_rows(repeats: int) -> list[Row]:
    """Growth with the number of chunks."""
    import scale

    has_plots = importlib.util.find_spec("matplotlib") is not None
    return scale.rows(image=SCALE_PLOT if has_plots else None)


def vllm_rows(repeats: int, lmcache_python: str = "") -> list[Row]:
    """Spec 14.7; what there is of it is written as it comes."""
    import bench_vllm

    if importlib.util.find_spec("vllm") is None:
        Console(stderr=True).print("vllm is left out: it is not installed")
        return []
    return bench_vllm.run(repeats, lambda rows: save(rows, RESULTS, "vllm.json"), lmcache_python)


#: Rows of each section, by its name.
SECTIONS: dict[str, Callable[[int], list[Row]]] = {
    "keys": engine.run_keys,
    "copies": lambda repeats: engine.run_cases(repeats, engine.MATRIX),
    "eviction": engine.run_eviction,
    "scale": scale_rows,
    "disk": disk_rows,
    "remote": remote_rows,
    "vllm": vllm_rows,
}


def main(
    only: Annotated[str, typer.Option(help=f"Sections: {', '.join(SECTIONS)}.")] = "",
    repeats: Annotated[int, typer.Option(help="Pairs per row; the median counts.")] = 7,
    lmcache_python: Annotated[
        str,
        typer.Option(help="Interpreter with vLLM and LMCache, for vllm.", envvar="LMCACHE_PYTHON"),
    ] = "",
) -> None:
    """Measure kvkeep against this machine's limits."""
    console = Console()
    torch.set_num_threads(1)
    chosen = [name.strip() for name in only.split(",") if name.strip()] or list(SECTIONS)
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        raise typer.BadParameter(f"no section {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    rows: list[Row] = []
    for name in chosen:
        console.print(f"{name} ...")
        is_vllm = name == "vllm"
        found = vllm_rows(repeats, lmcache_python) if is_vllm else SECTIONS[name](repeats)
        save(found, RESULTS, f"{name}.json")
        rows += found
    show(rows, console)
    if chosen == list(SECTIONS):
        save(rows, RESULTS)
    missed = [row.what for row in rows if row.met is False]
    met = sum(row.met is True for row in rows)
    console.print(f"{met} targets met, {len(missed)} missed; written to {RESULTS}")


if __name__ == "__main__":
    typer.run(main)
