"""``kvkeep replay``: what would pools of these sizes, with these policies, have found?"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.cli.bar import Bar
from kvkeep.cli.failures import telling_failures
from kvkeep.cli.texts import about_size
from kvkeep.config.units import parse_size
from kvkeep.errors import ConfigError, TraceError
from kvkeep.replay.plot import plot as draw
from kvkeep.replay.plot import require_plot
from kvkeep.replay.simulator import HitRate
from kvkeep.replay.sweep import (
    POLICY_NAMES,
    Sweep,
    check_policies,
    chunks_of_share,
    chunks_of_size,
    sweep,
    what_memory_buys,
)
from kvkeep.replay.trace import MOONCAKE_BLOCK_TOKENS, Trace, read_trace

WIDTH = 80
DEFAULT_SHARES = "1/64,1/16,1/4"
#: KV bytes of 512 tokens of Llama 3.1 8B in bfloat16: 2 * 32 layers * 8 heads * 128 * 2 bytes each.
DEFAULT_BLOCK_BYTES = "64MiB"


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Recorded workloads: JSON lines of Mooncake.", show_default=False),
    ],
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
    block_bytes: Annotated[
        str, typer.Option(help="KV bytes of a block of the trace; the default is Llama 3.1 8B's.")
    ] = DEFAULT_BLOCK_BYTES,
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in a block of the trace.")
    ] = MOONCAKE_BLOCK_TOKENS,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the table into this PNG file too; of one trace.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Replay recorded workloads through the real policies, with the bytes left out.

    Shows the share of prompt tokens that is found (only unbroken prefixes count) by size and
    policy, beside the most that any policy could find, and what more memory buys. Ends with exit
    code 2 if a trace or an option is no good.
    """
    values = []
    with telling_failures("replay"):
        block = _parse_size(block_bytes, "--block-bytes")
        policies = list(dict.fromkeys(name.strip().lower() for name in policy.split(",")))
        check_policies(policies)
        sizes, shares = _parse_sizes(size, share)
        if plot is not None:
            _check_plot(plot, traces)
        for path in traces:
            trace = _read(path, block_tokens)
            chunks = [chunks_of_size(one, block) for one in sizes]
            chunks += [chunks_of_share(one, trace.footprint()) for one in shares]
            with Bar(Console(stderr=True)) as bar:
                results = sweep(trace, chunks, policies, bar.report)
            if plot is not None:
                draw(results, plot, path.name, lambda chunks: about_size(chunks * block))
            if as_json:
                values.append(_values(path, results, block))
            else:
                _print(path, results, policies, block, Console())
    if as_json:
        typer.echo(json.dumps({"traces": values}))


def _check_plot(plot: Path, traces: list[Path]) -> None:
    """Refuse what cannot be drawn before the work."""
    require_plot()
    if len(traces) != 1:
        raise ConfigError(f"--plot draws one trace, not {len(traces)}")
    if not plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no such folder")


def _read(path: Path, block_tokens: int) -> Trace:
    try:
        trace = read_trace(path, chunk_tokens=block_tokens)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    if not trace.requests:
        raise TraceError(f"{path} has no requests")
    return trace


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
    shares = []
    for text in share.split(",") if share is not None else []:
        try:
            shares.append(Fraction(text.strip()))
        except (ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"--share {text!r} is no share; write 1/16 or 0.25") from error
        if not 0 < shares[-1] <= 1:
            raise ConfigError(f"--share {text!r} is no share: it must be above 0 and at most 1")
    return sizes, shares


def _values(path: Path, results: Sweep, block: int) -> dict[str, object]:
    def rate(one: HitRate) -> dict[str, object]:
        return {
            "hit_tokens": one.hit_tokens,
            "token_share": one.token_share,
            "chunk_share": one.chunk_share,
            "evictions": one.num_evictions,
        }

    return {
        "trace": str(path),
        "requests": results.num_requests,
        "asked_tokens": results.asked_tokens,
        "footprint_chunks": results.footprint,
        "block_bytes": block,
        "limit": rate(results.limit),
        "sizes": [
            {
                "chunks": one.chunks,
                "bytes": one.chunks * block,
                "policies": {name: rate(found) for name, found in one.by_policy.items()},
                "optimum": rate(one.best),
            }
            for one in results.sizes
        ],
    }


def _print(path: Path, results: Sweep, policies: list[str], block: int, console: Console) -> None:
    def label(chunks: int) -> str:
        return about_size(chunks * block)

    console.print()
    console.print(Text(path.name, style="bold"), width=WIDTH)
    console.print(
        f"{results.num_requests:,} requests, {results.asked_tokens:,} prompt tokens; all of it is "
        f"{results.footprint:,} blocks, {label(results.footprint)}",
        width=WIDTH,
        highlight=False,
    )
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("pool", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for name in policies:
        table.add_column(name, justify="right", no_wrap=True, style="bold")
    table.add_column("optimum", justify="right", no_wrap=True, style="dim")
    for one in results.sizes:
        rates = [*(one.by_policy[name] for name in policies), one.best]
        table.add_row(
            label(one.chunks),
            f"{100 * one.chunks / results.footprint:.1f}%",
            *(f"{100 * rate.token_share:.1f}%" for rate in rates),
        )
    console.print(table, width=WIDTH)
    console.print()
    sentence = what_memory_buys(results, policies[0], label)
    console.print(sentence, width=WIDTH, highlight=False)
