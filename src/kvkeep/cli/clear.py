"""``kvkeep clear``: removes what a tier holds, or the chunks of one model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console

from kvkeep.backends.disk.summary import summarize
from kvkeep.backends.disk.survey import Survey
from kvkeep.backends.remote.survey import StoreHolding
from kvkeep.cli.bar import Bar
from kvkeep.cli.failures import telling_failures
from kvkeep.cli.inspect_store import PlaceArgument, open_survey
from kvkeep.cli.texts import about_size
from kvkeep.config.store_url import RemoteURL
from kvkeep.errors import ConfigError

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
        found = summarize(Survey(self._path)).holdings
        return [StoreHolding(one.identity.hex(), one.chunks, one.size_bytes) for one in found]

    def clear(self, identities: Collection[str] | None, report: Callable[[int], object]) -> int:
        chosen = None if identities is None else set(map(bytes.fromhex, identities))
        return Survey(self._path).clear(chosen, report)


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
