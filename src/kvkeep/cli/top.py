"""``kvkeep top``: what running caches are doing now.

How ``kvkeep top`` looks: one block of lines per engine, 80 columns wide.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvkeep.cli.output import about_rate, about_size, telling_failures
from kvkeep.config.load import resolve_settings
from kvkeep.config.settings import Settings
from kvkeep.errors import LookupServiceError
from kvkeep.lookup.sockets import socket_directory
from kvkeep.top.rates import EngineView, Sample, TierView, view_engines
from kvkeep.top.sources import PageSource, Source

WIDTH = 80
#: Intervals that the sparkline goes back.
_HISTORY = 40
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*#@"
#: Kinds of failures that are listed.
_MOST_FAILURES = 4


class Screen:
    """Remembers the hit rates of each engine, and draws the newest view of all. One thread."""

    def __init__(self, *, plain: bool) -> None:
        """Be empty.

        Args:
            plain: the terminal has letters only.
        """
        self._bars = _PLAIN_BARS if plain else _BARS
        self._history: dict[str, deque[float | None]] = defaultdict(lambda: deque(maxlen=_HISTORY))

    def draw(self, views: Sequence[EngineView], note: str) -> RenderableType:
        """The picture.

        Args:
            views: of every engine, now.
            note: stands at the end, dim.
        """
        parts: list[RenderableType] = []
        for view in views:
            self._history[view.engine].append(view.hit_share)
            parts += [Text(), self._head(view), self._facts(view), _tiers(view)]
            if view.failures:
                parts.append(_failures(view))
        parts.append(Text())
        parts.append(Text(note, style="dim"))
        return Group(*parts)

    def _head(self, view: EngineView) -> Text:
        ranks = "1 rank" if view.ranks == 1 else f"{view.ranks} ranks"
        name = view.engine if len(view.engine) <= 48 else view.engine[:47] + "…"
        return Text.assemble(("engine ", "bold"), (name, "bold cyan"), f"  {ranks}")

    def _facts(self, view: EngineView) -> RenderableType:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(width=_HISTORY, no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_row(
            "hit rate",
            Text(self._sparkline(view.engine), style="green"),
            Text.assemble(
                (_share(view.hit_share), "bold"),
                f" now, {_share(view.hit_share_since_start)} in all",
            ),
        )
        full = view.pool_used_bytes / view.pool_bytes if view.pool_bytes else 0.0
        grid.add_row(
            "pool",
            ProgressBar(total=1.0, completed=full, width=_HISTORY, complete_style="cyan"),
            Text.assemble(
                (about_size(view.pool_used_bytes), "bold"), f" of {about_size(view.pool_bytes)}"
            ),
        )
        asked = f"{view.asked_tokens_per_s:,.0f} tokens/s asked for"
        leases = f"{view.leases} leases open"
        if view.leases_expired:
            leases += f", {view.leases_expired:,} expired"
        grid.add_row("lookups", asked, leases)
        return Padding(grid, (0, 0, 0, 2))

    def _sparkline(self, engine: str) -> str:
        signs = []
        for share in self._history[engine]:
            if share is None:
                signs.append(" ")
            else:
                signs.append(self._bars[min(int(share * len(self._bars)), len(self._bars) - 1)])
        return "".join(signs)


def _tiers(view: EngineView) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), width=WIDTH - 2)
    table.add_column("tier", no_wrap=True, ratio=1, overflow="ellipsis")
    for name in ("found", "loads", "stores", "chunks", "evicted", "dropped"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for tier in view.tiers:
        table.add_row(*_row(tier))
    return Padding(table, (1, 0, 0, 2))


def _row(tier: TierView) -> list[str | Text]:
    is_well = tier.state == "ok"
    return [
        tier.name.removesuffix("Backend"),
        f"{100 * tier.found_share:.1f}%",
        _rate(tier.load_bytes_per_s),
        _rate(tier.store_bytes_per_s),
        f"{tier.chunks:,}",
        f"{tier.evictions_per_s:,.0f}/s",
        f"{tier.dropped:,}",
        Text(tier.state, style="green" if is_well else "bold red"),
    ]


def _rate(bytes_per_s: float) -> str:
    return about_rate(bytes_per_s) if bytes_per_s else "-"


def _failures(view: EngineView) -> RenderableType:
    listed = [f"{what} {count:,}" for what, count in view.failures[:_MOST_FAILURES]]
    more = len(view.failures) - len(listed)
    rest = f"; {more} more" if more else ""
    text = Text.assemble(("failures  ", "dim"), ("; ".join(listed) + rest, "yellow"))
    return Padding(text, (0, 0, 0, 2))


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


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
    from kvkeep.top.sources import SocketSource

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
