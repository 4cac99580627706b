"""Draws the Grafana dashboard from what a Prometheus server answers to its queries.

For the pictures in the documents, where no Grafana is at hand: the panels, their places, titles and
queries are those of dashboards/kvkeep.json; the drawing is this script's.

Use: ``python scripts/draw_dashboard.py URL FROM TO OUT.png [--dark]`` with times in Unix seconds;
needs ``pip install 'kvkeep[plot]'``.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from PIL import Image

DASHBOARD = Path(__file__).parent.parent / "dashboards" / "kvkeep.json"
#: Inches of one grid cell of the dashboard, across and down.
CELL = 0.62, 0.33
STEP_S = 2
#: What Grafana would choose for scrapes every second.
RATE_INTERVAL = "15s"
#: Lines in a legend.
MOST_LEGEND = 6
LIGHT = {"back": "#ffffff", "panel": "#f6f7f9", "text": "#22262b", "grid": "#d9dde3"}
DARK = {"back": "#111217", "panel": "#181b1f", "text": "#d5d9e0", "grid": "#2c3138"}
COLORS = ["#3d71d9", "#e0752d", "#2f9e67", "#b44ac0", "#d1a417", "#d64545", "#17a2b8", "#8a8f98"]

Series = tuple[str, list[float], list[float]]


def query(url: str, expr: str, start: float, end: float) -> list[tuple[Mapping[str, str], list]]:
    """The series of one query over a time."""
    text = expr.replace("${prefix}", "kvkeep_").replace("$__rate_interval", RATE_INTERVAL)
    options = {
        "query": text.replace("$instance", ".*"),
        "start": f"{start:.0f}",
        "end": f"{end:.0f}",
        "step": str(STEP_S),
    }
    where = f"{url}/api/v1/query_range?{urllib.parse.urlencode(options)}"
    with urllib.request.urlopen(where, timeout=30) as answer:
        result = json.load(answer)["data"]["result"]
    return [(series["metric"], series["values"]) for series in result]


def panel_series(url: str, panel: Mapping[str, Any], start: float, end: float) -> list[Series]:
    """Everything that a panel shows: names, times from the start in seconds, values."""
    shown: list[Series] = []
    for target in panel["targets"]:
        for labels, values in query(url, target["expr"], start, end):
            name = re.sub(
                r"{{(\w+)}}",
                lambda match, labels=labels: labels.get(match[1], ""),
                target["legendFormat"],
            )
            numbers = [(float(at) - start, float(value)) for at, value in values]
            numbers = [(at, value) for at, value in numbers if not math.isnan(value)]
            if numbers:
                shown.append((name, [at for at, _ in numbers], [v for _, v in numbers]))
    return shown


def human(value: float, unit: str) -> str:
    """A value as Grafana writes it, about."""
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit in ("bytes", "Bps"):
        suffix = "/s" if unit == "Bps" else ""
        for name, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if abs(value) >= step:
                return f"{value / step:.3g} {name}{suffix}"
        return f"{value:.3g} B{suffix}"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or not value else f"{value * 1e3:.3g} ms"
    if abs(value) >= 1000:
        return f"{value / 1000:.3g} K"
    return f"{value:.3g}"


def draw_stat(axes: Axes, panel: Mapping[str, Any], series: list[Series], color: str) -> None:
    """One number."""
    axes.set_xticks([])
    axes.set_yticks([])
    unit = panel["fieldConfig"]["defaults"]["unit"]
    text = human(series[0][2][-1], unit) if series else "no data"
    axes.text(
        0.5,
        0.42,
        text,
        ha="center",
        va="center",
        fontsize=22,
        color=color,
        transform=axes.transAxes,
    )


def draw_lines(axes: Axes, panel: Mapping[str, Any], series: list[Series], theme: dict) -> None:
    """Lines over time."""
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    is_stacked = "stacking" in defaults["custom"]
    floor: dict[float, float] = {}
    for number, (name, times, values) in enumerate(series):
        color = COLORS[number % len(COLORS)]
        label = f"{name}  {human(values[-1], unit)}"
        bottoms = [floor.get(at, 0.0) for at in times] if is_stacked else [0.0] * len(times)
        tops = [low + value for low, value in zip(bottoms, values, strict=True)]
        if is_stacked:
            floor.update(zip(times, tops, strict=True))
        axes.plot(times, tops, color=color, linewidth=1.1, label=label)
        axes.fill_between(times, bottoms, tops, color=color, alpha=0.22 if is_stacked else 0.07)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.grid(color=theme["grid"], linewidth=0.6)
    highest = max((top for _, _, values in series for top in values), default=0.0)
    axes.set_ylim(bottom=0, top=defaults.get("max", None if highest else 1.0))
    axes.tick_params(colors=theme["text"], labelsize=6.5, length=0)
    if not series:
        axes.text(
            0.5,
            0.5,
            "no such event",
            ha="center",
            va="center",
            transform=axes.transAxes,
            color=theme["text"],
            fontsize=8,
            alpha=0.6,
        )
        return
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[:MOST_LEGEND],
        labels[:MOST_LEGEND],
        loc="upper left",
        bbox_to_anchor=(-0.04, -0.1),
        ncols=3 if panel["gridPos"]["w"] > 8 else 2,
        fontsize=6.2,
        frameon=False,
        labelcolor=theme["text"],
        handlelength=1.2,
        columnspacing=1.2,
    )


def draw(url: str, start: float, end: float, out: Path, theme: dict) -> int:
    """Draw every panel; returns how many have data."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(24 * CELL[0], height * CELL[1]), facecolor=theme["back"], dpi=110)
    with_data = 0
    for panel in panels:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - place["y"] / height
        if panel["type"] == "row":
            figure.text(
                left + 0.006,
                top - 0.6 / height,
                panel["title"],
                color=theme["text"],
                fontsize=11,
                fontweight="bold",
                va="center",
            )
            continue
        is_stat = panel["type"] == "stat"
        pad_left, pad_bottom = (0.006, 0.3) if is_stat else (0.048, 2.3)
        axes = figure.add_axes(
            (
                left + pad_left,
                top - (place["h"] - pad_bottom) / height,
                place["w"] / 24 - pad_left - 0.008,
                (place["h"] - pad_bottom - 1.25) / height,
            ),
            facecolor=theme["panel"],
        )
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_title(panel["title"], color=theme["text"], fontsize=8.5, loc="left", pad=4)
        series = panel_series(url, panel, start, end)
        with_data += bool(series)
        if is_stat:
            draw_stat(axes, panel, series, COLORS[0])
        else:
            axes.set_xlim(0, end - start)
            draw_lines(axes, panel, series, theme)
    drawn = io.BytesIO()
    figure.savefig(drawn, facecolor=theme["back"])
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(128).save(out, optimize=True)
    return with_data


def main(arguments: list[str]) -> int:
    """Draw, and say how many panels have data."""
    is_dark = "--dark" in arguments
    url, start, end, out = [part for part in arguments if part != "--dark"]
    count = draw(url, float(start), float(end), Path(out), DARK if is_dark else LIGHT)
    print(f"{out}: {count} panels with data")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
