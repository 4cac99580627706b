"""Checks docs/seed-table.md: every test that it names exists, and every row names one.

A test is a link: its name, or ``Class.test``, or the name of a test class, to the file that has it.
A row without a test says "not yet".

Use: ``python scripts/check_seed_table.py``; exit code 1 and one line per violation.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "seed-table.md"

_TEST = re.compile(r"\[((?:Test\w+|\w+Contract\.test_\w+|Test\w+\.test_\w+|test_\w+))\]\(([^)]+)\)")


def tests_in(path: Path) -> set[str]:
    """Names of the tests and test classes of a file."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{t.name}" for t in node.body if isinstance(t, ast.FunctionDef)}
    return names


def problems_of(page: Path) -> list[str]:
    """One line for every test that is not there and every row without one."""
    problems = []
    known: dict[Path, set[str]] = {}
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("| ") or line.startswith(("| Statement", "|  | Item")):
            continue
        found = _TEST.findall(line)
        if not found and "not yet" not in line:
            problems.append(f"{page.name}:{number}: a row without a test")
        for name, link in found:
            path = (page.parent / link).resolve()
            if path not in known:
                known[path] = tests_in(path) if path.is_file() else set()
            if name not in known[path]:
                problems.append(f"{page.name}:{number}: there is no {name} in {link}")
    return problems


def main() -> int:
    """Check the page."""
    problems = problems_of(PAGE)
    for problem in problems:
        print(problem)
    if not problems:
        count = len(_TEST.findall(PAGE.read_text(encoding="utf-8")))
        print(f"seed table: {count} tests named, all there")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
