"""The plot in a terminal: token hit rate against the size of the pool. Needs the extra ``plot``.

Plot: token hit rate against the size of the pool, a line per policy and one for the optimum.

Needs the extra ``plot``. Draws into a file, without a screen; the styles differ, so that it can be
read without colours, too. One thread.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from kvkeep.errors import MissingExtraError
from kvkeep.replay.sweep import Sweep

_CHART_MARKERS = ("braille", "dot", "x", "+", "o", "*")
#: Percent between two ticks.
_STEPS = (1, 2, 5, 10, 20, 25)
_COLOURS = ("blue+", "green+", "magenta+", "orange+", "cyan+", "red+")


def require_chart() -> None:
    """Refuse before the work rather than after it.

    Raises:
        MissingExtraError: plotext is not installed.
    """
    if importlib.util.find_spec("plotext") is None:
        raise MissingExtraError("a plot in the terminal", "plot")


def chart(results: Sweep, label: Callable[[int], str], *, width: int, colours: bool) -> str:
    """The plot as lines of text.

    Args:
        results: one or more sizes.
        label: name of a size in chunks.
        width: columns.
        colours: with escape sequences for colours.

    Raises:
        MissingExtraError: plotext is not installed.
    """
    require_chart()
    import plotext

    positions = list(range(1, len(results.sizes) + 1))  # each size is a step of its own
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, 17)
    best = [100 * one.best.token_share for one in results.sizes]
    plotext.plot(positions, best, label="optimum", marker="·", color="gray")
    for number, name in enumerate(results.sizes[0].by_policy):
        shares = [100 * one.by_policy[name].token_share for one in results.sizes]
        plotext.plot(
            positions,
            shares,
            label=name,
            marker=_CHART_MARKERS[number % len(_CHART_MARKERS)],
            color=_COLOURS[number % len(_COLOURS)],
        )
    plotext.xticks(positions, [label(one.chunks) for one in results.sizes])
    top = max(best)
    step = next((one for one in _STEPS if top / one <= 6), _STEPS[-1])
    ticks = [step * number for number in range(int(top / step) + 2) if step * number <= 100]
    plotext.ylim(0, max(top, ticks[-1]))
    plotext.yticks(ticks, [f"{one:g}" for one in ticks])
    plotext.title("prompt tokens found, %, by size of the pool")
    text = str(plotext.build())
    return text if colours else str(plotext.uncolorize(text))


_MARKERS = "osD^vP*X"


def require_plot() -> None:
    """Refuse before the work rather than after it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("a plot", "plot")


def plot(results: Sweep, path: Path, title: str, label: Callable[[int], str]) -> None:
    """Write a PNG file.

    Args:
        results: one or more sizes.
        path: of the file.
        title: above the plot.
        label: name of a size in chunks.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_plot()
    from matplotlib.figure import Figure

    sizes = [one.chunks for one in results.sizes]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    best = [100 * one.best.token_share for one in results.sizes]
    axes.plot(sizes, best, color="0.45", linestyle="--", marker=".", label="optimum")
    for number, name in enumerate(results.sizes[0].by_policy):
        shares = [100 * one.by_policy[name].token_share for one in results.sizes]
        axes.plot(sizes, shares, marker=_MARKERS[number % len(_MARKERS)], label=name)
    axes.axhline(100 * results.limit.token_share, color="0.8", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [label(chunks) for chunks in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("size of the pool")
    axes.set_ylabel("prompt tokens found, %")
    axes.set_title(title)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=150)
