"""Checks the documents against the project: links, anchors, named modules, generated tables.

Use: ``python scripts/check_docs.py`` checks; ``--write`` brings the tables in
docs/configuration.md and docs/metrics.md up to date first. Needs kvkeep to be installed. The code
blocks of the documents are run by tests/unit/test_docs.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic.fields import FieldInfo

from kvkeep.config.load import setting_fields
from kvkeep.config.settings import VLLM_ONLY
from kvkeep.metrics.catalogue import CATALOGUE

ROOT = Path(__file__).parent.parent

_LINK = re.compile(
    r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\""
)
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.(?:py|md|json|yaml))?|[a-z_0-9]+\.py)`")
_DOTTED = re.compile(r"`kvkeep((?:\.[a-z_0-9]+)+)`")


def documents() -> list[Path]:
    """Every document of the project."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors that a renderer makes of a document's headings."""
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def broken_links(path: Path) -> list[str]:
    """Links to files or headings that are not there."""
    problems = []
    text = path.read_text(encoding="utf-8")
    for pair in _LINK.findall(_FENCE.sub("", text)):
        link = pair[0] or pair[1]
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            problems.append(f"{path.relative_to(ROOT)}: no file {link}")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            problems.append(f"{path.relative_to(ROOT)}: no heading {link}")
    return problems


def missing_modules(path: Path) -> list[str]:
    """Files, folders and modules named in a document that are not there."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    source = ROOT / "src" / "kvkeep"
    problems = []
    for name in _MODULE.findall(text):
        places = [source / name, ROOT / name]
        if "/" not in name:
            places += source.rglob(name)
        if not any(place.exists() for place in places):
            problems.append(f"{path.relative_to(ROOT)}: names {name}, which is not there")
    for name in _DOTTED.findall(text):
        parts = name.strip(".").split(".")
        places = [source.joinpath(*parts[:count]) for count in (len(parts), len(parts) - 1)]
        if not any(place.is_dir() or place.with_suffix(".py").exists() for place in places):
            problems.append(f"{path.relative_to(ROOT)}: names kvkeep{name}, which is not there")
    return problems


def default_text(info: FieldInfo) -> str:
    """A default as a person would write it."""
    value = info.get_default(call_default_factory=True)
    annotation = str(info.metadata)
    if value is None or value == ():
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and "parse_duration" in annotation:
        return f"{value:g}s"
    if isinstance(value, int) and "parse_size" in annotation:
        return f"{value >> 20}MiB"
    return str(value)


def configuration_table() -> str:
    """The generated part of docs/configuration.md."""
    lines = ["| Setting | Default | What it does |", "|---|---|---|"]
    for path, info in setting_fields():
        only = " vLLM only." if path in VLLM_ONLY else ""
        lines.append(f"| `{path}` | `{default_text(info)}` | {info.description}{only} |")
    return "\n".join(lines)


def metrics_table() -> str:
    """The generated part of docs/metrics.md."""
    lines = ["| Metric | What it says, and when it moves |", "|---|---|"]
    for spec in CATALOGUE.values():
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "no labels"
        lines.append(
            f"| `{spec.exposed_name}`<br>{spec.kind}, {spec.unit}; {labels} "
            f"| {spec.text}<br>*Moves:* {spec.moves} |"
        )
    return "\n".join(lines)


#: Generated tables: document, name of the marks around the table, and what makes it.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("configuration.md", "table", configuration_table),
    ("metrics.md", "metrics", metrics_table),
]


def stale_tables(*, write: bool) -> list[str]:
    """Documents whose generated table is out of date; none once they were written."""
    problems = []
    for name, mark, make in TABLES:
        path = ROOT / "docs" / name
        begin, end = f"<!-- {mark} begin: scripts/check_docs.py -->", f"<!-- {mark} end -->"
        text = path.read_text(encoding="utf-8")
        head, _, rest = text.partition(begin)
        wanted = f"{head}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
        if text == wanted:
            continue
        if write:
            path.write_text(wanted, encoding="utf-8")
        else:
            problems.append(f"{name} is out of date: scripts/check_docs.py --write")
    return problems


def main(arguments: list[str]) -> int:
    """Check, after bringing the tables up to date if asked."""
    problems = [problem for path in documents() for problem in broken_links(path)]
    for name in ("architecture.md", "formats.md", "configuration.md"):
        problems += missing_modules(ROOT / "docs" / name)
    problems += missing_modules(ROOT / "README.md")
    problems += stale_tables(write="--write" in arguments)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"docs: {len(documents())} documents, links and names resolve")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
