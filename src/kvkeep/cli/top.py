"""``kvkeep top``: what running caches are doing now."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from kvkeep.cli.failures import telling_failures
from kvkeep.cli.top_screen import WIDTH, Screen
from kvkeep.config.load import resolve_settings
from kvkeep.config.settings import Settings
from kvkeep.errors import LookupServiceError
from kvkeep.lookup.paths import socket_directory
from kvkeep.top.rates import EngineView, view_engines
from kvkeep.top.samples import Sample
from kvkeep.top.sources import PageSource, Source

#: Deadline of each question to a worker.
TIMEOUT_S = 1.0
#: Between the two samples of ``--once``.
ONCE_S = 1.0


def top(
    url: Annotated[
        str | None,
        typer.Option(help="A metrics endpoint, like http://127.0.0.1:9400/metrics or unix:/path."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The engine's YAML file: where its sockets and metrics are.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look for a second, print, end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per look and engine.")
    ] = False,
) -> None:
    """Watch running caches: hit rate, tiers, pool, leases, evictions, failures.

    Finds the engines of this user on this machine through their lookup sockets, or reads the
    metrics endpoint of one worker: that of --url, or else of metrics.listen in the settings. Ends
    with Ctrl-C, and with exit code 2 if there is nothing to watch.
    """
    with telling_failures("top"):
        settings = resolve_settings(yaml_path=config, env=os.environ).settings
        source, first = _first(url, settings)
        with closing(source):
            try:
                if once or not (as_json or Console().is_terminal):
                    threading.Event().wait(ONCE_S)
                    _show_once(view_engines(first, source.poll()), as_json)
                elif as_json:
                    for views in _views(source, first, interval):
                        _print_json(views)
                else:
                    _watch(source, first, interval)
            except KeyboardInterrupt:
                return


def _watch(source: Source, first: list[Sample], interval: float) -> None:
    console = Console()
    screen = Screen(plain=console.options.ascii_only)
    note = f"every {interval:g} s; Ctrl-C ends"
    console.width = min(console.width, WIDTH)
    with Live(
        screen.draw(view_engines([], first), note),
        console=console,
        auto_refresh=False,
        vertical_overflow="crop",
    ) as live:
        for views in _views(source, first, interval):
            gone = "" if views else "no engine answers any more; "
            live.update(screen.draw(views, gone + note), refresh=True)


def _views(source: Source, first: list[Sample], interval: float) -> Iterator[list[EngineView]]:
    """A view every ``interval`` seconds, without end."""
    before = first
    pause = threading.Event()
    while True:
        pause.wait(interval)
        now = source.poll()
        yield view_engines(before, now)
        before = now


def _show_once(views: list[EngineView], as_json: bool) -> None:
    if as_json:
        _print_json(views)
        return
    console = Console()
    screen = Screen(plain=console.options.ascii_only)
    console.print(screen.draw(views, f"rates over {ONCE_S:g} s"), width=WIDTH)


def _print_json(views: list[EngineView]) -> None:
    for view in views:
        typer.echo(json.dumps(view.as_dict()))


def _first(url: str | None, settings: Settings) -> tuple[Source, list[Sample]]:
    """Where the numbers come from, and the first of them.

    Raises:
        LookupServiceError: nothing answers; says what to do.
    """
    from kvkeep.top.sockets import SocketSource

    directory = socket_directory(settings.lookup.socket_dir, os.environ)
    if url is None:
        source: Source = SocketSource(directory, timeout_s=TIMEOUT_S)
        first = source.poll()
        if first:
            return source, first
        source.close()
        url = _own_url(settings)
    if url is None:
        raise LookupServiceError(
            f"no running engine has a socket in {directory}; start vLLM with kvkeep as this user "
            "on this machine; if it sets lookup.socket_dir, name its settings with --config; an "
            "engine elsewhere, or transformers, is watched with metrics.listen and --url"
        )
    page = PageSource(url, token=settings.metrics.token, timeout_s=TIMEOUT_S)
    first = page.poll()
    if not first:
        raise LookupServiceError(
            f"{url} does not answer: {page.problem}; start the engine with metrics.listen set to "
            "it, and name its settings with --config if it asks for a token"
        )
    return page, first


def _own_url(settings: Settings) -> str | None:
    """The endpoint that the settings name; None if they name none."""
    listen, has_tls = settings.metrics.listen, settings.metrics.tls_cert is not None
    if listen is None or listen.startswith("unix:"):
        return listen
    return f"http{'s' if has_tls else ''}://{listen}/metrics"
