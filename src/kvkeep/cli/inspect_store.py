"""``kvkeep inspect URL``: what a remote store holds, and one value's header."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.backends.remote.base import ConnectorOptions
from kvkeep.backends.remote.names import create_connector
from kvkeep.backends.remote.survey import MOST_BYTES, StoreSurvey
from kvkeep.cli.failures import telling_failures
from kvkeep.cli.texts import about_size
from kvkeep.codec.frame import FrameFault, FrameHeader
from kvkeep.codec.names import codec_by_code
from kvkeep.config.store_url import RemoteURL
from kvkeep.errors import ConfigError

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
def open_survey(url: RemoteURL) -> Iterator[StoreSurvey]:
    """A connection to a store, for people.

    Raises:
        ConfigError: there is no such kind of store, or it needs something that is not installed.
        BackendError: the store does not answer.
    """
    options = ConnectorOptions(connections=1, connect_timeout_s=5.0, max_value_bytes=MOST_BYTES)
    connector = create_connector(url, options)
    try:
        connector.ping(_TIMEOUT_S)
        yield StoreSurvey(connector, _TIMEOUT_S)
    finally:
        connector.close()


def _show_holdings(survey: StoreSurvey, place: str, *, as_json: bool) -> None:
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
