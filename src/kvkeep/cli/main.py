"""The command ``kvkeep``: what it can do, and how it ends.

Exit code 0: all is well. 1: the command ran and what it checked is not so. 2: it could not run.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from kvkeep import __version__
from kvkeep.cli import config
from kvkeep.cli.bench import bench
from kvkeep.cli.demo import demo
from kvkeep.cli.doctor import doctor
from kvkeep.cli.replay import replay
from kvkeep.cli.stores import clear, fsck, inspect
from kvkeep.cli.top import top

app = typer.Typer(
    name="kvkeep",
    help="Keeps the KV caches that an LLM engine has computed, so that a prompt is prefilled once.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
_BEGIN, _WATCH, _STORES = "To begin", "To measure and watch", "To look into a store and clear it"

app.command(
    epilog="Example: kvkeep demo --engine vllm --questions 3",
    rich_help_panel=_BEGIN,
)(demo)
app.command(
    epilog="Example: kvkeep doctor --config kvkeep.yaml --model /models/llama-3.1-8b",
    rich_help_panel=_BEGIN,
)(doctor)
app.add_typer(config.app, name="config", rich_help_panel=_BEGIN)
app.command(
    epilog="Example: kvkeep top --once --json",
    rich_help_panel=_WATCH,
)(top)
app.command(
    epilog="Example: kvkeep bench --dir /var/cache/kvkeep",
    rich_help_panel=_WATCH,
)(bench)
app.command(
    epilog="Example: kvkeep replay trace.jsonl --size 64GiB,128GiB --policy reuse,lru",
    rich_help_panel=_WATCH,
)(replay)
app.command(
    epilog="Example: kvkeep inspect /var/cache/kvkeep --chunk 3fa9",
    rich_help_panel=_STORES,
)(inspect)
app.command(
    epilog="Example: kvkeep fsck /var/cache/kvkeep --repair",
    rich_help_panel=_STORES,
)(fsck)
app.command(
    epilog="Example: kvkeep clear redis://cache.example:6379 --identity 3fa9",
    rich_help_panel=_STORES,
)(clear)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvkeep {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Keeps the KV caches that an LLM engine has computed, so that a prompt is prefilled once."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a sign that a terminal cannot show is no error
            stream.reconfigure(errors="replace")
