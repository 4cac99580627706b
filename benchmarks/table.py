"""Puts the figures of ``benchmarks/results`` into docs/performance.md, as one table per section.

    make bench && python benchmarks/table.py

Only what stands between the two markers in the document is replaced.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvkeep.bench.measure import Row

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
#: Titles of the sections of ``run.py``, in order.
TITLES = {
    "keys": "Keys and lookups",
    "copies": "Copies between the engine's memory and the pool",
    "eviction": "Stores that evict",
    "scale": "Growth",
    "disk": "Disk",
    "remote": "Remote stores",
    "vllm": "Through vLLM",
}


def table(rows: list[Row]) -> list[str]:
    """Lines of one table in Markdown."""
    lines = [
        "| what | kvkeep | limit | ratio | target | met |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        met = {None: "", True: "yes", False: "no"}[row.met]
        target = "" if row.target is None else f"{'≥' if row.is_rate else '≤'} {row.target:.2f}"
        figures = f"{row.kvkeep:,.2f} {row.unit} | {row.limit:,.2f} {row.unit} | {row.ratio:.2f}"
        lines.append(f"| {row.label} | {figures} | {target} | {met} |")
    return lines


def figures(results: Path) -> str:
    """All sections that were measured, each with the machine it was measured on."""
    parts: list[str] = []
    machines: dict[str, list[str]] = {}
    for name, title in TITLES.items():
        path = results / f"{name}.json"
        if not path.exists():
            continue
        document = json.loads(path.read_text())
        rows = [
            Row(**{key: value for key, value in row.items() if key != "met"})
            for row in document["rows"]
        ]
        parts += ["", f"### {title}", "", *table(rows)]
        found = document["machine"]
        words = ", ".join(f"{key} {value}" for key, value in found.items())
        machines.setdefault(words, []).append(title)
    said = [f"- {words}: {', '.join(titles)}" for words, titles in machines.items()]
    return "\n".join(["Measured on", "", *said, *parts])


def main() -> None:
    """Rewrite the document."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{figures(RESULTS)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
