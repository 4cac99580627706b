"""``kvkeep inspect``: what a tier holds, and one chunk's header; the disk's part of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.backends.disk.ledger import LedgerState
from kvkeep.backends.disk.scan import FoundChunk
from kvkeep.backends.disk.summary import Holding, Summary, summarize
from kvkeep.backends.disk.survey import Survey
from kvkeep.cli.failures import telling_failures
from kvkeep.cli.inspect_store import PlaceArgument, inspect_store
from kvkeep.cli.texts import about_size, ago
from kvkeep.codec.frame import FrameFault
from kvkeep.codec.names import codec_by_code
from kvkeep.errors import ConfigError
from kvkeep.keys import ChunkKey

WIDTH = 80
#: Hex digits of an identity on the screen.
_SHORT = 16


def inspect(
    place: PlaceArgument,
    chunk: Annotated[
        str | None, typer.Option(help="Show this chunk: the first hex digits of its key.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Show what a tier holds: chunks and bytes by identity, of a disk also ages; or one chunk.

    Changes nothing. Ends with exit code 1 if the chunk that was asked for does not verify, and
    with 2 if it could not run. Whether all chunks verify says kvkeep fsck.
    """
    if "://" in place:
        inspect_store(place, chunk, as_json=as_json)
        return
    with telling_failures("inspect"):
        survey = Survey(Path(place))
        if chunk is not None:
            key = _the_one(survey, chunk)
            found = survey.examine(key)
            if found is None:
                raise ConfigError(f"the chunk {key.hex()} went while it was looked at")
        else:
            summary = summarize(survey)
    if chunk is None:
        if as_json:
            typer.echo(json.dumps(_summary_values(survey, summary)))
        else:
            _print_summary(survey, summary, Console())
        return
    values = _chunk_values(survey, key, found)
    if as_json:
        typer.echo(json.dumps(values))
    else:
        if values["fault"] is None:
            values["fault"] = "none: header and payload verify"
        for name, value in values.items():
            typer.echo(f"{name:<17} {value}")
    if isinstance(found, FrameFault):
        raise typer.Exit(1)


def _the_one(survey: Survey, prefix: str) -> ChunkKey:
    keys = survey.find(prefix)
    if len(keys) == 1:
        return keys[0]
    if not keys:
        raise ConfigError(f"no chunk in {survey.root} has a key that starts with {prefix}")
    some = ", ".join(key.hex()[: len(prefix) + 8] for key in keys[:3])
    raise ConfigError(f"{len(keys):,} keys start with {prefix}: {some}, ...; give more digits")


def _chunk_values(
    survey: Survey, key: ChunkKey, found: FoundChunk | FrameFault | None
) -> dict[str, object]:
    values: dict[str, object] = {"key": key.hex(), "path": str(survey.path_of(key))}
    if not isinstance(found, FoundChunk):
        return {**values, "fault": str(found)}
    header = found.header
    return {
        **values,
        "fault": None,
        "identity": header.identity.hex(),
        "format": header.meta.fmt.name,
        "dtype": header.meta.dtype,
        "shape": list(header.meta.shape),
        "codec": codec_by_code(header.codec).name,
        "payload_bytes": header.payload_bytes,
        "payload_checksum": header.payload_checksum.hex(),
        "used": _utc(found.used_ns),
    }


def _utc(time_ns: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ns // 10**9))


def _summary_values(survey: Survey, summary: Summary) -> dict[str, object]:
    return {
        "directory": str(survey.root),
        "identities": [
            {
                "identity": one.identity.hex(),
                "chunks": one.chunks,
                "bytes": one.size_bytes,
                "oldest_use": _utc(one.oldest_ns),
                "newest_use": _utc(one.newest_ns),
                "forms": [
                    {"format": fmt, "dtype": dtype, "shape": list(shape), "chunks": count}
                    for (fmt, dtype, shape), count in one.forms.most_common()
                ],
            }
            for one in summary.holdings
        ],
        "faults": dict(summary.causes),
        "ledger": None if summary.ledger is None else _ledger_values(summary.ledger),
    }


def _ledger_values(ledger: LedgerState) -> dict[str, object]:
    return {
        "used_bytes": ledger.used_bytes,
        "members": len(ledger.members),
        "budget_bytes": ledger.budget_bytes if ledger.members else None,
    }


def _print_summary(survey: Survey, summary: Summary, console: Console) -> None:
    console.print(Text(str(survey.root), style="bold"), width=WIDTH)
    if not summary.holdings:
        console.print("No chunks.")
    else:
        console.print(_table(summary.holdings), width=WIDTH)
    ledger = summary.ledger
    if ledger is None:
        console.print("The ledger does not verify; the next start counts anew.", style="red")
    elif ledger.members:
        console.print(
            f"In use {about_size(ledger.used_bytes)} of {about_size(ledger.budget_bytes)}; "
            f"open in {len(ledger.members)} engine(s), as far as the ledger knows.",
            width=WIDTH,
        )
    else:
        console.print(f"In use {about_size(ledger.used_bytes)}; open in no engine.", width=WIDTH)
    if summary.causes:
        causes = ", ".join(f"{count:,} {cause}" for cause, count in summary.causes.most_common())
        console.print(Text(f"No good by their headers: {causes}. See kvkeep fsck.", style="red"))


def _table(holdings: tuple[Holding, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("identity", no_wrap=True)
    table.add_column("form", overflow="fold")
    for name in ("chunks", "size", "last used", "oldest"):
        table.add_column(name, justify="right", no_wrap=True)
    now_ns = time.time_ns()
    for one in holdings:
        (fmt, dtype, _), _ = one.forms.most_common(1)[0]
        table.add_row(
            one.identity.hex()[:_SHORT],
            f"{fmt} {dtype}",
            f"{one.chunks:,}",
            about_size(one.size_bytes),
            ago(now_ns - one.newest_ns),
            ago(now_ns - one.oldest_ns),
        )
    return table
