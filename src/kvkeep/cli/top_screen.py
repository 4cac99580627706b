"""How ``kvkeep top`` looks: one block of lines per engine, 80 columns wide."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvkeep.cli.texts import about_rate, about_size
from kvkeep.top.rates import EngineView, TierView

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
