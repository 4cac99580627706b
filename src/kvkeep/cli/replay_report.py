"""How ``kvkeep replay`` shows its results: tables of 80 columns, a chart, a sentence; and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.cli.texts import about_size, about_time
from kvkeep.replay.chart import chart
from kvkeep.replay.simulator import HitRate
from kvkeep.replay.sweep import Sweep, what_memory_buys
from kvkeep.replay.trace import Trace

if TYPE_CHECKING:
    from kvkeep.replay.real import RealRun, RealTiers

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Scale:
    """From chunks to bytes, and what is not counted.

    Attributes:
        block_bytes: KV of one block.
        num_warm_up: requests at the start that are not counted.
    """

    block_bytes: int
    num_warm_up: int

    def label(self, chunks: int) -> str:
        """Size of so many chunks, for people."""
        return about_size(chunks * self.block_bytes)


def sweep_values(path: Path, results: Sweep, scale: Scale) -> dict[str, object]:
    """The results of one trace as JSON has them."""
    return {
        "trace": str(path),
        "requests": results.num_requests,
        "warm_up_requests": scale.num_warm_up,
        "asked_tokens": results.asked_tokens,
        "footprint_chunks": results.footprint,
        "block_bytes": scale.block_bytes,
        "limit": _rate_values(results.limit),
        "sizes": [
            {
                "chunks": one.chunks,
                "bytes": one.chunks * scale.block_bytes,
                "policies": {name: _rate_values(found) for name, found in one.by_policy.items()},
                "optimum": _rate_values(one.best),
            }
            for one in results.sizes
        ],
    }


def real_values(tiers: RealTiers, simulated: HitRate, run: RealRun) -> dict[str, object]:
    """One run through a real engine as JSON has it."""
    return {
        "policy": tiers.policy,
        "chunks": tiers.memory_chunks,
        "disk_chunks": tiers.disk_chunks,
        "simulated": _rate_values(simulated),
        "found": _rate_values(run.rate),
        "found_tokens": run.found_tokens,
        "loaded_chunks": run.loaded_chunks,
        "wrong_chunks": run.wrong_chunks,
        "moved_bytes": run.moved_bytes,
        "seconds": run.seconds,
        "failures": run.failures,
    }


def print_sweep(
    path: Path, results: Sweep, scale: Scale, console: Console, *, with_chart: bool
) -> None:
    """The table of one trace, the chart if it is wanted, and the sentence."""
    console.print()
    console.print(Text(path.name, style="bold"), width=WIDTH)
    counted = f"; the first {scale.num_warm_up:,} are not counted" if scale.num_warm_up else ""
    console.print(
        f"{results.num_requests:,} requests, {results.asked_tokens:,} prompt tokens{counted}; "
        f"{results.footprint:,} blocks in all, {scale.label(results.footprint)}",
        width=WIDTH,
        highlight=False,
    )
    console.print()
    console.print(_table(results, scale), width=WIDTH)
    console.print()
    if with_chart:
        is_coloured = console.color_system is not None
        text = chart(results, scale.label, width=WIDTH, colours=is_coloured)
        console.print(Text.from_ansi(text.rstrip()), width=WIDTH)
        console.print()
    policy = next(iter(results.sizes[0].by_policy))
    sentence = what_memory_buys(results, policy, scale.label)
    console.print(sentence, width=WIDTH, highlight=False)


def print_speed(results: Sweep, seconds: float, console: Console) -> None:
    """How much was replayed, and how fast."""
    runs = sum(len(one.by_policy) + 1 for one in results.sizes) + 1
    rate = runs * results.num_requests / seconds
    text = f"{runs} replays in {about_time(seconds)}, {rate:,.0f} requests/s."
    console.print(Text(text, style="dim"), width=WIDTH)


def print_real(
    trace: Trace,
    runs: Sequence[tuple[RealTiers, HitRate, RealRun]],
    scale: Scale,
    console: Console,
) -> None:
    """The runs through a real engine, each beside its simulation."""
    first = runs[0][0]
    chunk = about_size(first.chunk_bytes)
    console.print()
    console.print(Text(f"the same with real bytes, {chunk} a block", style="bold"), width=WIDTH)
    console.print()
    table = _plain_table()
    for name in ("pool", "policy", "simulated", "found", "on disk", "requests/s", "compared"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    table.add_column("wrong", justify="right", no_wrap=True)
    wrong = loaded = 0
    for tiers, simulated, run in runs:
        total = sum(run.found_tokens.values())
        on_disk = run.found_tokens.get("LocalDiskBackend", 0)
        table.add_row(
            scale.label(tiers.memory_chunks),
            tiers.policy,
            _percent(simulated.token_share),
            _percent(run.rate.token_share),
            _percent(on_disk / total if total else 0.0) if tiers.disk_chunks else "-",
            f"{len(trace.requests) / run.seconds:,.0f}",
            f"{run.loaded_chunks:,}",
            Text(f"{run.wrong_chunks:,}", style="bold red" if run.wrong_chunks else "green"),
        )
        wrong, loaded = wrong + run.wrong_chunks, loaded + run.loaded_chunks
    console.print(table, width=WIDTH)
    console.print()
    if wrong:
        text = Text(f"{wrong:,} blocks were not those of their tokens.", style="bold red")
    else:
        text = Text(f"Each of the {loaded:,} blocks that were loaded was right.", style="green")
    if first.disk_chunks:
        text.append(
            f' "simulated" is the pool alone, "on disk" the share of what was found that '
            f"came from a disk of {scale.label(first.disk_chunks)}.",
            style="dim",
        )
    console.print(text, width=WIDTH)


def _table(results: Sweep, scale: Scale) -> Table:
    table = _plain_table()
    table.add_column("pool", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    policies = list(results.sizes[0].by_policy)
    for name in policies:
        table.add_column(name, justify="right", no_wrap=True, style="bold")
    table.add_column("optimum", justify="right", no_wrap=True, style="dim")
    for one in results.sizes:
        rates = [*(one.by_policy[name] for name in policies), one.best]
        table.add_row(
            scale.label(one.chunks),
            _percent(one.chunks / results.footprint),
            *(_percent(rate.token_share) for rate in rates),
        )
    return table


def _plain_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _rate_values(one: HitRate) -> dict[str, object]:
    return {
        "hit_tokens": one.hit_tokens,
        "token_share": one.token_share,
        "chunk_share": one.chunk_share,
        "evictions": one.num_evictions,
    }
