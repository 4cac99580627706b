"""The plot in a terminal: token hit rate against the size of the pool. Needs the extra ``plot``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from kvkeep.errors import MissingExtraError
from kvkeep.replay.sweep import Sweep

_MARKERS = ("braille", "dot", "x", "+", "o", "*")
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
            marker=_MARKERS[number % len(_MARKERS)],
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
