"""``kvkeep replay``: what would pools of these sizes, with these policies, have found?

How ``kvkeep replay`` shows its results: tables of 80 columns, a chart, a sentence; and JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.cli.output import Bar, about_size, about_time, telling_failures
from kvkeep.config.base import parse_size
from kvkeep.errors import ConfigError, TraceError
from kvkeep.replay.plot import chart, require_chart, require_plot
from kvkeep.replay.plot import plot as draw
from kvkeep.replay.sweep import (
    POLICY_NAMES,
    HitRate,
    Report,
    Sweep,
    check_policies,
    chunks_of_share,
    chunks_of_size,
    sweep,
    what_memory_buys,
)
from kvkeep.replay.trace import Trace, read_workload

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


DEFAULT_SHARES = "1/64,1/16,1/4"
#: KV bytes of a token of Llama 3.1 8B in bfloat16: 2 * 32 layers * 8 heads * 128 * 2 bytes each.
DEFAULT_TOKEN_BYTES = 128 << 10
#: Bytes of a chunk in a replay with real bytes, the smallest that is a whole memory page.
_REAL_STEP = 4096
_MODEL_HELP = "Folder of a model: its config says how large a block is. Default: Llama 3.1 8B."
_REAL_HELP = "Run the real store too, with small chunks of real bytes that are compared."
_TRACES_HELP = "Recorded workloads: JSON lines of Mooncake or with token ids, or logs of vLLM."


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The options, checked."""

    sizes: list[int]
    shares: list[Fraction]
    policies: list[str]
    block_bytes: int | None
    token_bytes: int
    block_tokens: int | None
    warm_up: Fraction
    plot: Path | None
    chart: bool
    disk_bytes: int
    real_bytes: int | None

    def scale(self, trace: Trace) -> Scale:
        """How large a block of this trace is."""
        block = self.block_bytes or trace.chunk_tokens * self.token_bytes
        return Scale(block, int(self.warm_up * len(trace.requests)))

    def capacities(self, trace: Trace, block: int) -> list[int]:
        """Sizes of the pool, in chunks."""
        chunks = [chunks_of_size(one, block) for one in self.sizes]
        return chunks + [chunks_of_share(one, trace.footprint()) for one in self.shares]


def replay(
    traces: Annotated[list[Path], typer.Argument(help=_TRACES_HELP, show_default=False)],
    *,
    size: Annotated[
        str | None, typer.Option(help="Sizes of the pool, like 64GiB,128GiB.", show_default=False)
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            help="Sizes as shares of all that the workload has. Default: " + DEFAULT_SHARES
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policies: " + ", ".join(sorted(POLICY_NAMES)) + ".")
    ] = "reuse,lru",
    model: Annotated[Path | None, typer.Option(help=_MODEL_HELP, show_default=False)] = None,
    block_bytes: Annotated[
        str | None, typer.Option(help="KV bytes of a block, instead of a model.")
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a block. Default: 512 for Mooncake, 256 for tokens."),
    ] = None,
    warm_up: Annotated[
        str, typer.Option(help="Share of the requests that fill the pool and are not counted.")
    ] = "0",
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the table of one trace into this PNG file.", show_default=False),
    ] = None,
    chart: Annotated[bool, typer.Option("--chart", help="Draw it in the terminal.")] = False,
    real: Annotated[bool, typer.Option("--real", help=_REAL_HELP)] = False,
    disk: Annotated[
        str | None, typer.Option(help="Size of a disk tier below the pool, with --real.")
    ] = None,
    real_bytes: Annotated[
        str, typer.Option(help="Bytes of a chunk with --real, in steps of 4KiB.")
    ] = "16KiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Replay recorded workloads through the real policies, with the bytes left out.

    Shows the share of prompt tokens that is found (only unbroken prefixes count) by size and
    policy, beside the most that any policy could find, and what more memory buys. With --real the
    same through a real engine with real bytes; ends with exit code 1 if a single one is wrong. Ends
    with 2 if a trace or an option is no good.
    """
    values, wrong = [], 0
    with telling_failures("replay"):
        sizes, shares = _parse_sizes(size, share)
        wanted = _Wanted(
            sizes=sizes,
            shares=shares,
            policies=_parse_policies(policy, real),
            block_bytes=None if block_bytes is None else _parse_size(block_bytes, "--block-bytes"),
            token_bytes=_token_bytes(model),
            block_tokens=block_tokens,
            warm_up=_parse_share(warm_up, "--warm-up", is_whole_allowed=False),
            plot=plot,
            chart=chart,
            disk_bytes=0 if disk is None else _parse_size(disk, "--disk"),
            real_bytes=_parse_real(real_bytes) if real else None,
        )
        _check(wanted, traces)
        for path in traces:
            one, num_wrong = _replay_one(path, wanted, None if as_json else Console())
            values.append(one)
            wrong += num_wrong
    if as_json:
        typer.echo(json.dumps({"traces": values}))
    if wrong:
        raise typer.Exit(1)


def _replay_one(
    path: Path, wanted: _Wanted, console: Console | None
) -> tuple[dict[str, object], int]:
    """Replay one trace; returns its values and how many chunks were wrong."""
    trace = _read(path, wanted.block_tokens)
    scale = wanted.scale(trace)
    chunks = wanted.capacities(trace, scale.block_bytes)
    begin = time.perf_counter()
    with _bar() as report:
        results = sweep(trace, chunks, wanted.policies, report, num_warm_up=scale.num_warm_up)
    seconds = time.perf_counter() - begin
    if wanted.plot is not None:
        draw(results, wanted.plot, path.name, scale.label)
    values = {**sweep_values(path, results, scale), "seconds": seconds}
    if console is not None:
        print_sweep(path, results, scale, console, with_chart=wanted.chart)
        print_speed(results, seconds, console)
    if wanted.real_bytes is None:
        return values, 0
    found, wrong = _run_real(trace, results, wanted, scale, console)
    return {**values, "real": found}, wrong


def _run_real(
    trace: Trace, results: Sweep, wanted: _Wanted, scale: Scale, console: Console | None
) -> tuple[list[dict[str, object]], int]:
    """Each size and policy through a real engine."""
    from kvkeep.replay.real import RealTiers, replay_real

    runs = []
    for one in results.sizes:
        for name in wanted.policies:
            with tempfile.TemporaryDirectory(prefix="kvkeep-replay-") as folder, _bar() as report:
                tiers = RealTiers(
                    name,
                    one.chunks,
                    wanted.disk_bytes // scale.block_bytes,
                    Path(folder),
                    wanted.real_bytes or _REAL_STEP,
                )
                run = replay_real(trace, tiers, report, num_warm_up=scale.num_warm_up)
            runs.append((tiers, one.by_policy[name], run))
    if console is not None:
        print_real(trace, runs, scale, console)
    return [real_values(*run) for run in runs], sum(run.wrong_chunks for _, _, run in runs)


@contextmanager
def _bar() -> Iterator[Report]:
    with Bar(Console(stderr=True)) as bar:
        yield bar.report


def _check(wanted: _Wanted, traces: Sequence[Path]) -> None:
    """Refuse what cannot be drawn or run before the work."""
    if wanted.chart:
        require_chart()
        if Console().options.ascii_only:
            raise ConfigError("--chart needs a terminal that shows UTF-8; or draw with --plot FILE")
    if wanted.disk_bytes and wanted.real_bytes is None:
        raise ConfigError("--disk has no effect without --real")
    if wanted.plot is None:
        return
    require_plot()
    if len(traces) != 1:
        raise ConfigError(f"--plot draws one trace, not {len(traces)}")
    if not wanted.plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot {wanted.plot}: there is no such folder")


def _read(path: Path, block_tokens: int | None) -> Trace:
    try:
        trace = read_workload(path, chunk_tokens=block_tokens)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    if not any(request.keys for request in trace.requests):
        raise TraceError(f"{path} has no requests that fill a block of {trace.chunk_tokens} tokens")
    return trace


def _token_bytes(model: Path | None) -> int:
    if model is None:
        return DEFAULT_TOKEN_BYTES
    from kvkeep.doctor.model_config import read_model

    return read_model(model).token_bytes


def _parse_policies(text: str, real: bool) -> list[str]:
    names = list(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    check_policies(names)
    if real and "probation" in names:
        raise ConfigError("--policy probation is for comparisons, and no setting; leave --real out")
    return names


def _parse_real(text: str) -> int:
    size_bytes = _parse_size(text, "--real-bytes")
    if size_bytes % _REAL_STEP:
        raise ConfigError(f"--real-bytes {text!r}: must be a multiple of 4KiB")
    return size_bytes


def _parse_size(text: str, option: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error
    if not isinstance(size_bytes, int) or size_bytes < 1:
        raise ConfigError(f"{option} {text!r}: must be more than nothing")
    return size_bytes


def _parse_sizes(size: str | None, share: str | None) -> tuple[list[int], list[Fraction]]:
    """Bytes, and shares of the footprint."""
    if size is None and share is None:
        share = DEFAULT_SHARES
    sizes = [_parse_size(text, "--size") for text in size.split(",")] if size is not None else []
    texts = share.split(",") if share is not None else []
    shares = [_parse_share(text, "--share", is_whole_allowed=True) for text in texts]
    if 0 in shares:
        raise ConfigError("--share '0' is no share: it must be above 0 and at most 1")
    return sizes, shares


def _parse_share(text: str, option: str, *, is_whole_allowed: bool) -> Fraction:
    try:
        share = Fraction(text.strip())
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{option} {text!r} is no share; write 1/16 or 0.25") from error
    if not 0 <= share <= 1 or (share == 1 and not is_whole_allowed):
        bound = "above 0 and at most 1" if is_whole_allowed else "at least 0 and below 1"
        raise ConfigError(f"{option} {text!r} is no share: it must be {bound}")
    return share
