"""Checks that a module is one idea and a function fits on a screen.

A module has at most 800 lines; a function at most 60, its docstring apart, and at most 6
parameters, where keyword-only ones of public functions do not count.

Use: ``python scripts/check_sizes.py [SOURCE_FOLDER]``; exit code 1 and one line per violation.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 800
FUNCTION_LINES = 60
PARAMETERS = 6


def problems_of(path: Path) -> Iterator[str]:
    """What is too large in one module."""
    text = path.read_text(encoding="utf-8")
    num_lines = len(text.splitlines())
    if num_lines > MODULE_LINES:
        yield f"{path}: {num_lines} lines, more than {MODULE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        if length > FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name} has {length} lines, over {FUNCTION_LINES}"
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        if node.name.startswith("_") and not node.name.startswith("__"):
            names += [arg.arg for arg in node.args.kwonlyargs]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > PARAMETERS:
            yield f"{path}:{node.lineno}: {node.name} has {count} parameters, over {PARAMETERS}"


def main(arguments: list[str]) -> int:
    """Check the folder given, or this project's."""
    source = Path(arguments[0]) if arguments else Path(__file__).parent.parent / "src" / "kvkeep"
    problems = [problem for path in sorted(source.rglob("*.py")) for problem in problems_of(path)]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"sizes: modules up to {MODULE_LINES} lines, functions up to {FUNCTION_LINES}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
