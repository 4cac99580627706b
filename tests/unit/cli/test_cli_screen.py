"""Keeping an engine's own output off the screen, and showing it when something fails."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, subprocess, sys
from kvkeep.cli.output import quiet_screen

print("before")
try:
    with quiet_screen() as console:
        print("noise from python")
        subprocess.run([sys.executable, "-c", "print('noise from a child')"], check=True)
        os.write(2, b"noise from below\\n")
        console.print("progress")
        if len(sys.argv) > 1:
            raise ZeroDivisionError
except ZeroDivisionError:
    pass
print("after")
print("after, too", file=sys.stderr)
"""


def _run(*arguments: str) -> tuple[list[str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_only_the_console_is_seen() -> None:
    assert _run() == (["before", "after"], ["progress", "after, too"])


def test_a_failure_shows_what_was_written() -> None:
    out, errors = _run("fail")
    assert out == ["before", "after"]
    assert errors[0] == "progress"
    assert sorted(errors[1:-1]) == ["noise from a child", "noise from below", "noise from python"]
    assert errors[-1] == "after, too"
