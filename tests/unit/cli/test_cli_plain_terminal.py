"""Terminals that show letters only: no command ends with an error about its own signs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRACE = Path(__file__).parents[2] / "traces" / "mooncake_synthetic.jsonl"
COMMAND = "import sys; sys.argv[0] = 'kvkeep'; from kvkeep.cli.main import app; app()"


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "80"},
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("config", "explain"), ("replay", TRACE, "--share", "1/8", "--policy", "lru")],
    ids=lambda arguments: arguments[0],
)
def test_it_is_shown_in_ascii(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_a_chart_says_what_it_needs():
    pytest.importorskip("plotext")
    done = run("replay", TRACE, "--chart")
    assert done.returncode == 2
    assert b"needs a terminal that shows UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr
