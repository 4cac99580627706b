"""``kvkeep inspect``: what a tier holds, and one chunk's header; the disk's part of it.

``kvkeep inspect URL``: what a remote store holds, and one value's header.

``kvkeep fsck``: verifies every file of a disk tier, and removes what is damaged if asked.

``kvkeep clear``: removes what a tier holds, or the chunks of one model.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.backends.disk.catalog import FoundChunk
from kvkeep.backends.disk.inspect import Damage, Holding, Inspector, Summary, summarize
from kvkeep.backends.disk.ledger import LedgerState
from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.base import ConnectorOptions
from kvkeep.backends.remote.inspect import MOST_BYTES, StoreHolding, StoreInspector
from kvkeep.cli.output import Bar, about_size, ago, telling_failures
from kvkeep.codec.frame import HEADER_BYTES, FrameFault, FrameHeader
from kvkeep.codec.names import codec_by_code
from kvkeep.config.base import RemoteURL
from kvkeep.errors import ConfigError
from kvkeep.hashing import ChunkKey

#: The argument of every command that looks into a tier's store.
PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY_OR_URL",
        help="The disk tier's directory (disk.path), or the remote tier's store (remote.url).",
        show_default=False,
    ),
]
WIDTH = 80
_TIMEOUT_S = 30.0


def inspect_store(url: str, chunk: str | None, *, as_json: bool) -> None:
    """Show all holdings, or one chunk; exit code 1 if that does not verify."""
    with telling_failures("inspect"), open_survey(RemoteURL.parse(url)) as survey:
        place = str(RemoteURL.parse(url))
        if chunk is None:
            _show_holdings(survey, place, as_json=as_json)
            return
        name = survey.find(chunk.lower())
        found = survey.examine(name)
        if found is None:
            raise ConfigError(f"the chunk {name} went while it was looked at")
    values = _values(place, name, found)
    if as_json:
        typer.echo(json.dumps(values))
    else:
        if values["fault"] is None:
            values["fault"] = "none: header and payload verify"
        for field, value in values.items():
            typer.echo(f"{field:<17} {value}")
    if isinstance(found, FrameFault):
        raise typer.Exit(1)


@contextmanager
def open_survey(url: RemoteURL) -> Iterator[StoreInspector]:
    """A connection to a store, for people.

    Raises:
        ConfigError: there is no such kind of store, or it needs something that is not installed.
        BackendError: the store does not answer.
    """
    options = ConnectorOptions(connections=1, connect_timeout_s=5.0, max_value_bytes=MOST_BYTES)
    connector = create_connector(url, options)
    try:
        connector.ping(_TIMEOUT_S)
        yield StoreInspector(connector, _TIMEOUT_S)
    finally:
        connector.close()


def _show_holdings(survey: StoreInspector, place: str, *, as_json: bool) -> None:
    holdings = survey.holdings()
    if as_json:
        rows = [
            {"identity": one.identity, "chunks": one.chunks, "bytes": one.size_bytes}
            for one in holdings
        ]
        typer.echo(json.dumps({"store": place, "identities": rows}))
        return
    console = Console()
    console.print(Text(place, style="bold"), width=WIDTH)
    if not holdings:
        console.print("No chunks.")
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("identity", no_wrap=True)
    for name in ("chunks", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in holdings:
        table.add_row(one.identity, f"{one.chunks:,}", about_size(one.size_bytes))
    console.print(table, width=WIDTH)


def _values(place: str, name: str, found: FrameHeader | FrameFault) -> dict[str, object]:
    values: dict[str, object] = {"store": place, "name": name}
    if isinstance(found, FrameFault):
        return {**values, "fault": str(found)}
    return {
        **values,
        "fault": None,
        "identity": found.identity.hex(),
        "format": found.meta.fmt.name,
        "dtype": found.meta.dtype,
        "shape": list(found.meta.shape),
        "codec": codec_by_code(found.codec).name,
        "payload_bytes": found.payload_bytes,
        "payload_checksum": found.payload_checksum.hex(),
    }


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
        survey = Inspector(Path(place))
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


def _the_one(survey: Inspector, prefix: str) -> ChunkKey:
    keys = survey.find(prefix)
    if len(keys) == 1:
        return keys[0]
    if not keys:
        raise ConfigError(f"no chunk in {survey.root} has a key that starts with {prefix}")
    some = ", ".join(key.hex()[: len(prefix) + 8] for key in keys[:3])
    raise ConfigError(f"{len(keys):,} keys start with {prefix}: {some}, ...; give more digits")


def _chunk_values(
    survey: Inspector, key: ChunkKey, found: FoundChunk | FrameFault | None
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


def _summary_values(survey: Inspector, summary: Summary) -> dict[str, object]:
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


def _print_summary(survey: Inspector, summary: Summary, console: Console) -> None:
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


#: What a person reads for a cause.
MEANINGS = {
    "truncated": "the file is shorter than its header says",
    "length": "the file is longer than its header says",
    "not_a_file": "a directory, link or pipe has a chunk's name",
    "magic": "not a chunk at all",
    "version": "written by another version",
    "header_checksum": "a bit of the header changed",
    "fields": "a field of the header is out of bounds",
    "wrong_key": "a whole chunk under another one's name",
    "payload_checksum": "a bit of the payload changed",
    "codec": "a payload that its codec cannot have made",
    "stranger": "no name of a chunk",
    "ledger": "the ledger does not verify; a repair counts anew",
    "missing": "there is no ledger; a repair counts anew",
}


def fsck(
    directory: Annotated[
        Path, typer.Argument(help="The disk tier's directory (disk.path).", show_default=False)
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged, and count anew.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Read and verify every chunk of a disk tier, header and payload.

    Changes nothing without --repair. Engines may run meanwhile. Ends with exit code 0 if all is
    well, with 1 if damage was found, repaired or not, and with 2 if it could not run.
    """
    num_chunks = size_bytes = 0
    damages: list[Damage] = []
    with telling_failures("fsck"):
        survey = Inspector(directory)
        with Bar(Console(stderr=True)) as bar:
            for number, item in enumerate(survey.verify()):
                bar.report(number, len(survey.entries), f"{num_chunks:,} chunks are whole")
                if isinstance(item, Damage):
                    damages.append(item)
                elif isinstance(item, FoundChunk):
                    num_chunks += 1
                    size_bytes += HEADER_BYTES + item.header.payload_bytes
        left = survey.repair(damages) if repair else [item.path for item in damages]
    left += [item.path for item in damages if repair and not (item.removable or _is_mended(item))]
    if as_json:
        values = {
            "directory": str(survey.root),
            "chunks": num_chunks,
            "bytes": size_bytes,
            "damages": [
                {"path": str(item.path), "cause": item.cause, "repaired": item.path not in left}
                for item in damages
            ],
        }
        typer.echo(json.dumps(values))
    else:
        console = Console(soft_wrap=True)
        console.print(f"{num_chunks:,} chunks are whole, {about_size(size_bytes)}.", style="green")
        _print_damages(damages, survey.root, console)
        if damages:
            console.print(_what_happened(damages, left, repair))
    if damages:
        raise typer.Exit(1)


def _is_mended(damage: Damage) -> bool:
    """There was no ledger, and a repair has made one."""
    return damage.cause == "missing"


def _print_damages(damages: list[Damage], root: Path, console: Console) -> None:
    by_cause: dict[str, list[Path]] = defaultdict(list)
    for damage in damages:
        by_cause[str(damage.cause)].append(damage.path.relative_to(root))
    for cause, paths in sorted(by_cause.items()):
        meaning = MEANINGS.get(cause, "cannot be read, so it may be whole")
        console.print(Text.assemble((cause, "bold red"), f": {meaning}"))
        for path in sorted(paths):
            console.print(Text(f"  {path}"))


def _what_happened(damages: list[Damage], left: list[Path], repair: bool) -> str:
    count = "1 file is" if len(damages) == 1 else f"{len(damages):,} files are"
    if not repair:
        return f"{count} no good. Nothing was changed; --repair removes what is damaged."
    if left:
        return f"{count} no good; {len(left):,} of them could not be removed and stay."
    return f"{count} no good, and removed or written anew."


_HEX = frozenset("0123456789abcdef")


class _Place(Protocol):
    """A directory or a store."""

    def holdings(self) -> list[StoreHolding]:
        """What it holds, by identity."""

    def clear(self, identities: Collection[str] | None, report: Callable[[int], object]) -> int:
        """Remove all chunks, or those of these identities; returns how many went."""


class _Directory:
    """The disk tier's, looked at anew each time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def holdings(self) -> list[StoreHolding]:
        found = summarize(Inspector(self._path)).holdings
        return [StoreHolding(one.identity.hex(), one.chunks, one.size_bytes) for one in found]

    def clear(self, identities: Collection[str] | None, report: Callable[[int], object]) -> int:
        chosen = None if identities is None else set(map(bytes.fromhex, identities))
        return Inspector(self._path).clear(chosen, report)


def clear(
    place: PlaceArgument,
    identity: Annotated[
        str | None,
        typer.Option(help="Only chunks of this one: its first hex digits, see kvkeep inspect."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Remove what a tier holds: all chunks, or those of one model and layout.

    Engines may run meanwhile; they compute again what is gone. Ends with exit code 1 if something
    is left, or if the answer was no, and with 2 if it could not run.
    """
    with telling_failures("clear"):
        digits = "" if identity is None else _digits(identity)
        with _opened(place) as (name, there):
            chosen = [one for one in there.holdings() if _is_of(one.identity, digits)]
            num_chunks = sum(one.chunks for one in chosen)
            size = about_size(sum(one.size_bytes for one in chosen))
            if digits and not chosen:
                raise ConfigError(f"no identity in {name} starts with {digits}")
            if num_chunks and not yes:
                question = f"Remove {_chunks(num_chunks)}, {size}, from {name}?"
                typer.confirm(question, abort=True, err=True)
            with Bar(Console(stderr=True)) as bar:
                removed = there.clear(
                    {one.identity for one in chosen} if digits else None,
                    lambda done: bar.report(done, num_chunks, f"removed {_chunks(done)}"),
                )
            left = sum(one.chunks for one in there.holdings() if _is_of(one.identity, digits))
    if as_json:
        typer.echo(json.dumps({"place": name, "removed": removed, "left": left}))
    else:
        typer.echo(f"Removed {_chunks(removed)}." + (f" {left:,} are left." if left else ""))
    if left:
        raise typer.Exit(1)


def _chunks(number: int) -> str:
    return "1 chunk" if number == 1 else f"{number:,} chunks"


def _digits(identity: str) -> str:
    """The digits that were given; none at all would be everything, which nobody has asked for."""
    digits = identity.strip().lower()
    if not digits or set(digits) - _HEX:
        raise ConfigError(f"--identity {identity!r}: these are no hex digits")
    return digits


def _is_of(identity: str, digits: str) -> bool:
    """An identity starts with these digits; a store's names have only the first 32 of it."""
    return identity.startswith(digits[: len(identity)])


@contextmanager
def _opened(place: str) -> Iterator[tuple[str, _Place]]:
    """The place's name and the place."""
    if "://" in place:
        url = RemoteURL.parse(place)
        with open_survey(url) as store:
            yield str(url), store
    else:
        yield place, _Directory(Path(place))
