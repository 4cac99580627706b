"""Checks that imports go down only, and that heavy packages stay where they belong.

The layers are those of docs/architecture.md. A module may import its own layer and those below; two
modules of one layer may not import each other in a circle. ``kvkeep.testing`` may import anything
and nothing imports it. Imports for type checkers alone do not count: they are never executed.

Use: ``python scripts/check_layers.py [SOURCE_FOLDER]``; exit code 1 and one line per violation.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

#: Layer of every module or package below ``kvkeep``, the longest matching name counts.
LAYERS = {
    "errors": 0,
    "layout": 0,
    "identity": 0,
    "hashing": 0,
    "logs": 0,
    "tokens": 1,
    "prefix": 1,
    "config": 1,
    "metrics": 1,
    "memory": 2,
    "policy": 2,
    "codec": 2,
    "backends": 3,
    "gpu": 3,
    "storage": 4,
    "ranks": 4,
    "engine": 5,
    "lookup": 5,
    "connectors": 6,
    "cli": 7,
    "demo": 7,
    "replay": 7,
    "bench": 7,
    "doctor": 7,
    "top": 7,
}
#: May import anything, and nothing imports it.
ANYTHING = "testing"
#: Where a heavy package may be imported; the prefixes are names below ``kvkeep``.
PLACES = {
    # backends and storage name torch's dtypes in the signatures of allocation
    # the engine's surface: masks and slot mappings
    "torch": (
        "memory",
        "gpu",
        "backends",
        "storage",
        "ranks",
        "engine",
        "connectors",
        "demo",
        "bench",
        "doctor",
        "replay.real",
    ),
    # the demo is a user of vLLM, as anybody's program is
    "vllm": ("connectors.vllm", "demo.vllm_run"),
    "transformers": ("connectors.hf", "demo"),
    "asyncio": ("storage", "backends", "lookup"),
}


def below(module: str, prefix: str) -> bool:
    """``module`` is ``prefix`` or lies below it."""
    return module == prefix or module.startswith(f"{prefix}.")


def layer_of(module: str) -> int | None:
    """The layer of a module, named without the leading ``kvkeep.``; None if it has none."""
    known = [name for name in LAYERS if below(module, name)]
    return LAYERS[max(known, key=len)] if known else None


def executed_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run, in functions too; not those under ``if TYPE_CHECKING``."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = list(node.orelse)
    for child in children:
        yield from executed_imports(child)


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names that an import statement may bring in; relative ones start with a dot."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = "." * node.level + (node.module or "")
    return [f"{module}.{alias.name}" for alias in node.names]


def module_name(path: Path, source: Path) -> str:
    """``memory.base`` for ``memory/base.py``; a package has the name of its folder."""
    parts = list(path.relative_to(source).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Checker:
    """Collects the violations of one source folder."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.modules = {module_name(path, source): path for path in sorted(source.rglob("*.py"))}
        self.problems: list[str] = []
        self.edges: dict[str, set[str]] = {module: set() for module in self.modules}

    def run(self) -> list[str]:
        """Check every module."""
        for module, path in self.modules.items():
            if module and not below(module, ANYTHING) and layer_of(module) is None:
                self.problems.append(f"{path}: has no layer; give it one in {Path(__file__).name}")
                continue
            for node in executed_imports(ast.parse(path.read_text(encoding="utf-8"))):
                for name in imported_names(node):
                    self._check(module, name, f"{path}:{node.lineno}")
        self._find_circles()
        return self.problems

    def _check(self, module: str, name: str, where: str) -> None:
        if name.startswith("."):
            self.problems.append(f"{where}: relative import {name}; write it in full")
        package, _, rest = name.partition(".")
        if package == "kvkeep":
            self._check_own(module, rest, where)
        places = PLACES.get(package)
        if places is None or below(module, ANYTHING):
            return
        if not any(below(module, place) for place in places):
            self.problems.append(f"{where}: {package} may be imported in {', '.join(places)} only")

    def _check_own(self, module: str, name: str, where: str) -> None:
        """One import of another module of kvkeep."""
        target = name
        while target and target not in self.modules:
            target = target.rpartition(".")[0]  # the last part is a name inside the module
        if target and target != module:
            self.edges[module].add(target)
        if below(module, ANYTHING):
            return
        if below(target, ANYTHING):
            self.problems.append(f"{where}: {module or 'kvkeep'} imports {ANYTHING}")
            return
        mine, theirs = layer_of(module), layer_of(target)
        if mine is not None and theirs is not None and theirs > mine:
            self.problems.append(
                f"{where}: {module} (layer {mine}) imports {target} (layer {theirs}) above it"
            )

    def _find_circles(self) -> None:
        done: set[str] = set()
        for module in self.edges:
            self._walk(module, [], done)

    def _walk(self, module: str, trail: list[str], done: set[str]) -> None:
        if module in trail:
            circle = " -> ".join([*trail[trail.index(module) :], module])
            self.problems.append(f"{self.modules[module]}: circle of imports: {circle}")
            return
        if module in done:
            return
        for target in sorted(self.edges[module]):
            self._walk(target, [*trail, module], done)
        done.add(module)


def main(arguments: list[str]) -> int:
    """Check the folder given, or this project's."""
    source = Path(arguments[0]) if arguments else Path(__file__).parent.parent / "src" / "kvkeep"
    problems = Checker(source).run()
    for problem in problems:
        print(problem)
    if not problems:
        print(f"layers: {len(Checker(source).modules)} modules, imports go down only")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
