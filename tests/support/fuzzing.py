"""Feeds the parsers of ``fuzz_targets``: guided by coverage with atheris, or a few at random.

``python -m support.fuzzing`` runs every target for its share of the time, each in a process
of its own, starting from its corpus. What fails is kept in the corpus, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import MissingExtraError

#: Inputs are no longer, and a process takes no more memory; a parser that needs more has no bound.
MAX_INPUT_BYTES, MAX_MEMORY_MB = 4096, 1024
#: One input may take so long.
INPUT_TIMEOUT_S = 20
#: What one run adds to a corpus: so many of the shortest inputs, none longer.
KEPT_INPUTS, MAX_KEPT_BYTES = 16, 1024


@dataclass(frozen=True, slots=True)
class Outcome:
    """One target's run.

    Attributes:
        name: of the target.
        executions: inputs that it took.
        failed: it did not survive one.
        output: the last lines that the fuzzer wrote.
    """

    name: str
    executions: int
    failed: bool
    output: str


def corpus_of(folder: Path, name: str) -> list[bytes]:
    """The inputs that are kept for a target, in the order of their names."""
    return [path.read_bytes() for path in sorted((folder / name).iterdir())]


def variations(corpus: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Inputs that are like those of the corpus: cut, joined, with bytes changed."""
    pick = random.Random(seed)
    for _ in range(count):
        data = bytearray(pick.choice(corpus))
        for _ in range(pick.randrange(1, 5)):
            where = pick.randrange(len(data) + 1)
            kind = pick.randrange(5)
            if kind == 0:
                data[where : where + 1] = pick.randbytes(1)
            elif kind == 1:
                del data[where : where + pick.randrange(1, 9)]
            elif kind == 2:
                data[where:where] = pick.randbytes(pick.randrange(1, 9))
            elif kind == 3:
                data[where : where + 8] = pick.choice((0, 1, (1 << 63) - 1, 1 << 62)).to_bytes(
                    8, "little"
                )
            else:
                other = pick.choice(corpus)
                data[where:] = other[pick.randrange(len(other) + 1) :]
        yield bytes(data[:MAX_INPUT_BYTES])


def fuzz(name: str, seconds: int, corpus: Path, *, keep: bool) -> Outcome:
    """Run one target in a process of its own.

    Args:
        name: of the target.
        seconds: for how long.
        corpus: where the targets' inputs are, in a folder each; what fails is added.
        keep: add small inputs that reach code which the corpus did not.
    """
    own = corpus / name
    own.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvkeep-fuzz-") as found:
        done = _run(name, [found, str(own)], [f"-max_total_time={seconds}"], own)
        text = done.stdout + done.stderr
        if keep:
            _keep(Path(found), own)
    counted = re.search(r"stat::number_of_executed_units:\s+(\d+)", text)
    tail = "\n".join(text.splitlines()[-40:])
    return Outcome(name, int(counted[1]) if counted else 0, done.returncode != 0, tail)


def _keep(found: Path, own: Path) -> None:
    """Add the shortest of what a run has found; each reached code that those before it did not."""
    inputs = sorted((path.read_bytes() for path in found.iterdir()), key=len)
    for data in inputs[:KEPT_INPUTS]:
        if len(data) <= MAX_KEPT_BYTES:
            (own / f"found-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)


def _run(
    name: str, folders: list[str], options: list[str], own: Path
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "support.fuzzing",
        "--one",
        name,
        "--",
        f"-max_len={MAX_INPUT_BYTES}",
        f"-rss_limit_mb={MAX_MEMORY_MB}",
        f"-timeout={INPUT_TIMEOUT_S}",
        f"-artifact_prefix={own}/failed-",
        "-print_final_stats=1",
        *options,
        *folders,
    ]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _feed(name: str, arguments: list[str]) -> None:
    """The process of one target; does not return."""
    try:
        import atheris
    except ImportError as error:
        raise MissingExtraError("fuzzing", "fuzz") from error
    with atheris.instrument_imports(include=["kvkeep", "json", "yaml"]):
        from support.fuzz_targets import TARGETS
    target = TARGETS[name]
    target(b"")  # what is made once is made before memory is watched
    atheris.Setup([sys.argv[0], *arguments], target)
    atheris.Fuzz()


def main() -> int:
    """Fuzz what the command line names; the number of targets that failed, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="names; all if none is given")
    parser.add_argument("--seconds", type=int, default=240, help="for all targets together")
    parser.add_argument("--corpus", type=Path, default=Path("tests/fuzz/corpus"))
    parser.add_argument("--keep", action="store_true", help="add what reaches new code")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        _feed(options.one, options.targets)
    from support.fuzz_targets import TARGETS

    names = options.targets or sorted(TARGETS)
    share = max(1, options.seconds // len(names))
    failed = 0
    for name in names:
        outcome = fuzz(name, share, options.corpus, keep=options.keep)
        state = "FAILED" if outcome.failed else "ok"
        print(f"{name:16} {outcome.executions:>10,} inputs  {state}", flush=True)
        if outcome.failed:
            failed = 1
            print(outcome.output)
    return failed


if __name__ == "__main__":
    sys.exit(main())
