"""How the benchmarks measure: two things in turn in one run, the median ratio of several pairs."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Columns of the screen that the table takes.
WIDTH = 80


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was measured.
        kvkeep: kvkeep's figure, in ``unit``.
        limit: the figure it is held against, in ``unit``.
        unit: of the figures; in those that end with ``/s`` larger is better, else smaller is.
        ratio: median over the pairs of kvkeep / limit.
        target: the ratio that spec 14 asks for, or None where there is no target.
        interval: where the ratio lies nine times in ten, if that was looked at.
    """

    what: str
    kvkeep: float
    limit: float
    unit: str
    ratio: float
    target: float | None
    interval: Sequence[float] | None = None

    @property
    def label(self) -> str:
        """What was measured, and how sure the ratio is."""
        if self.interval is None:
            return self.what
        low, high = self.interval
        return f"{self.what} ({low:.3f} to {high:.3f})"

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.is_rate else self.ratio <= self.target

    @property
    def is_rate(self) -> bool:
        """Larger is better."""
        return self.unit.endswith("/s")


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def pairs(
    ours: Callable[[], object],
    limit: Callable[[], object],
    *,
    repeats: int,
    before: Callable[[], object] | None = None,
) -> list[tuple[float, float]]:
    """Seconds of (ours, limit), measured in turn; ``before`` runs untimed before each of ours."""
    result = []
    for turn in range(repeats + 1):
        if before is not None:
            before()
        gc.collect()  # before each: it leaves both with the same cold caches
        ours_s = seconds(ours)
        gc.collect()
        limit_s = seconds(limit)
        if turn:  # the first pair warms up
            result.append((ours_s, limit_s))
    return result


def time_row(
    what: str, measured: list[tuple[float, float]], *, target: float | None, extra_ms: float = 0.0
) -> Row:
    """A row of times; ``extra_ms`` is what the target allows on top of the limit."""
    ours = statistics.median(a for a, _ in measured) * 1e3
    limit = statistics.median(b for _, b in measured) * 1e3 + extra_ms
    ratio = statistics.median(a * 1e3 / (b * 1e3 + extra_ms) for a, b in measured)
    return Row(what, ours, limit, "ms", ratio, target)


def rate_row(
    what: str, measured: list[tuple[float, float]], num_bytes: int, *, target: float | None
) -> Row:
    """A row of rates for moving ``num_bytes``."""
    ours = num_bytes / statistics.median(a for a, _ in measured) / 1e9
    limit = num_bytes / statistics.median(b for _, b in measured) / 1e9
    ratio = statistics.median(b / a for a, b in measured)
    return Row(what, ours, limit, "GB/s", ratio, target)


def use_one_thread() -> None:
    """Let torch copy with one thread in this process, as a memcpy does."""
    torch.set_num_threads(1)


def cpu_name() -> str:
    """Name of the processor, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table in 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, width=WIDTH)
    table.add_column("what", ratio=1)
    for name in ("kvkeep", "limit", "ratio", "target", "met"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        sign = "≥" if row.is_rate else "≤"
        met, style = {None: ("", ""), True: ("yes", "green"), False: ("no", "yellow")}[row.met]
        table.add_row(
            row.label,
            f"{row.kvkeep:.2f} {row.unit}",
            f"{row.limit:.2f} {row.unit}",
            Text(f"{row.ratio:.2f}", style=style),
            "" if row.target is None else f"{sign} {row.target:.2f}",
            Text(met, style=style),
        )
    console.print(table, width=WIDTH)


def row_values(row: Row) -> dict[str, object]:
    """A row as JSON has it."""
    return {**asdict(row), "met": row.met}


def save(rows: Sequence[Row], directory: Path, name: str = "latest.json") -> Path:
    """Write the rows and the machine's description as JSON; returns the path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    document = {
        "machine": machine(),
        "rows": [row_values(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return path
