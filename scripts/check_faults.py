"""Checks that every fault that caches of this kind have had is named by a test here.

A test names a fault in its docstring: ``Fault 17: ...``, or ``Faults 13, 22: ...``. The table in
docs/faults.md is generated from those docstrings, so it cannot name a test that does not exist.

Use: ``python scripts/check_faults.py`` checks; ``--write`` brings docs/faults.md up to date first.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- table begin: scripts/check_faults.py -->", "<!-- table end -->"

#: What went wrong elsewhere, by number. Numbers are those that the tests use.
FAULTS = {
    1: "A batch read answered without the missing key, and bytes were paired with the wrong keys",
    2: "A put skipped chunks that were there, and paired the other bytes with the first keys",
    3: "A chunk vanished between lookup and load: the mask promised more than was copied",
    4: "A store failed half-way and its key stayed visible",
    5: "Content of the right length and the wrong bytes was served; a short read left old bytes",
    6: "The engine's layout changed while shapes stayed the same",
    7: "Two layouts with the same shape were told apart by guessing",
    8: "Page bytes that depend on the CPU's instruction set were shared",
    9: "KV was shared across adapters, salts, images, revisions or RoPE settings",
    10: "Keys depended on the process, or collided for crafted inputs",
    11: "A key changed on its way through a text form",
    12: "Eviction freed part of a chunk under a reader",
    13: "A read went on after its lease had ended",
    14: "Pages were saved after they had gone to another request",
    15: "A handle outlived the memory behind it",
    16: "Names with separators, or long ones, collided or could not be stored",
    17: "A pin outlived a request that was aborted before it ran",
    18: "An exception between allocation and put leaked memory",
    19: "A generator was dropped half-way and leaked",
    20: "A lookup was answered after its asker had given up, and stayed pinned",
    21: "A second lookup under one id lost the first one's pins",
    22: "A timer took back memory that a slow reader was using",
    23: "A rejected put stayed in progress for ever",
    24: "A process died while it held leases",
    25: "An allocation waited for ever because nothing could be evicted",
    26: "Two loads each held half of the pool and waited for the other half",
    27: "A wait ran on the loop that had to do the work",
    28: "One exception ended the lookup server",
    29: "A layerwise call yielded another number of times, or died, in a rare state",
    30: "A sleep under a lock made latency grow with the number of requests",
    31: "An assertion about the scheduler's state ended the engine",
    32: "A failed asynchronous load was never reported as finished",
    33: "One dead tier switched the others off",
    34: "A call to a remote store had no deadline",
    35: "A server restarted and its client did not notice",
    36: "One rank failed inside a collective and the others waited",
    37: "After a restart files were neither found nor counted",
    38: "The size counter drifted, or several processes each used the whole budget",
    39: "A crash, a full disk or a vanished file left half a chunk",
    40: "Parts of one chunk were evicted apart from each other",
    41: "A client's protocol lost step and answers went to other questions",
    42: "Loading took longer than computing again",
    43: "Stores queued without bound, or loads waited behind them",
    44: "A key existed and its value was empty",
    45: "A misspelt setting or a bad value was ignored",
    46: "An option had no effect without another one, and nothing said so",
    47: "The hit rate was measured where only hits arrive",
    48: "An endpoint listened to everyone, ran code or showed secrets",
    49: "Importing the package changed the process",
    50: "The first use paid for committing all memory",
}
#: What this version of kvkeep can have; the others wait for the tiers that can have them.
REQUIRED = {*range(1, 23), *range(25, 32), *range(33, 36), *range(37, 42), 43, 44, 45, 46, 47, 49}

_NAMED = re.compile(r"\bFaults? (\d+(?:(?:, | and |, and )\d+)*)")


def named_faults(text: str) -> set[int]:
    """The numbers in ``Fault 1`` and ``Faults 2, 3 and 4``."""
    return {int(n) for match in _NAMED.finditer(text) for n in re.findall(r"\d+", match[1])}


def tests_by_fault(folder: Path) -> dict[int, list[str]]:
    """Fault -> tests, as ``path::name`` or ``path::Class::name``."""
    found: dict[int, list[str]] = defaultdict(list)
    shipped = folder.parent / "src" / "kvkeep" / "testing"
    paths = [*folder.rglob("test_*.py"), *shipped.rglob("*.py")]
    for path in sorted(paths):
        place = path.relative_to(folder.parent).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{place}::{node.name}::" if isinstance(node, ast.ClassDef) else f"{place}::"
            for test in inner:
                if not isinstance(test, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                if not test.name.startswith("test_"):
                    continue
                for number in named_faults(ast.get_docstring(test) or ""):
                    found[number].append(prefix + test.name)
    return dict(found)


def table(found: dict[int, list[str]]) -> str:
    """The generated part of docs/faults.md."""
    lines = ["| | What went wrong elsewhere | Tests here |", "|---|---|---|"]
    for number, title in FAULTS.items():
        tests = []
        for test in found.get(number, []):
            path, _, name = test.partition("::")
            tests.append(f"[{name.replace('::', '.')}](../{path})")
        lines.append(f"| {number} | {title} | {'<br>'.join(tests) or 'not yet'} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Check, after bringing the table up to date if asked."""
    found = tests_by_fault(ROOT / "tests")
    problems = [
        f"fault {number} is named by no test: {FAULTS[number]}"
        for number in sorted(REQUIRED - found.keys())
    ]
    problems += [
        f"there is no fault {number}, named by {', '.join(found[number])}"
        for number in sorted(found.keys() - FAULTS.keys())
    ]
    head, _, rest = TABLE.read_text(encoding="utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    wanted = f"{head}{BEGIN}\n{table(found)}\n{END}{tail}"
    if "--write" in arguments:
        TABLE.write_text(wanted, encoding="utf-8")
    elif TABLE.read_text(encoding="utf-8") != wanted:
        problems.append(f"{TABLE.name} is out of date: python scripts/check_faults.py --write")
    for problem in problems:
        print(problem)
    if not problems:
        print(
            f"faults: {len(found)} named by tests, all of the {len(REQUIRED)} required among them"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
