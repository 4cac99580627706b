"""The progress bar that commands show on standard error while they work.

How every command ends when it cannot run: one message on standard error, exit code 2.

The screen while an engine that writes to it as it likes runs in this process and below it.

vLLM and its processes write their own lines to the terminal. They go to a file meanwhile, whose
end is shown if something fails; only what is written to the given console is seen. For commands
that own their process.

Sizes, rates, times and ages for people: rounded, in the unit that is short. Pure.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvkeep.errors import KVKeepError


class Bar:
    """A progress bar that is gone when the work is done, and never there without a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None)

    def report(self, done: int, total: int, doing: str) -> None:
        """Show how far the work is."""
        self._progress.update(self._task, completed=done, total=total, description=doing)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


@contextmanager
def telling_failures(command: str) -> Iterator[None]:
    """Turn what a user can cause (wrong settings, missing files) into a message.

    Args:
        command: its name, which the message starts with.
    """
    try:
        yield
    except KVKeepError as error:
        _tell(command, str(error), error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        _tell(command, where + (error.strerror or str(error)), error)


def _tell(command: str, message: str, error: Exception) -> None:
    typer.secho(f"kvkeep {command}: {message}", fg="red", err=True)
    raise typer.Exit(2) from error


#: Bytes of the engine's output that are shown when it failed.
TAIL_BYTES = 3_000


@contextlib.contextmanager
def quiet_screen() -> Iterator[Console]:
    """Send what this process and its children write into a file; the console still writes.

    Standard output and standard error are restored at the end; if the block raises, the end of what
    was written is printed first.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    with tempfile.TemporaryFile() as log, os.fdopen(os.dup(2), "w") as screen:
        try:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            yield Console(file=screen)
        except BaseException:
            sys.stdout.flush()
            sys.stderr.flush()
            screen.write(_tail(log))
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, old in zip((1, 2), saved, strict=True):
                os.dup2(old, descriptor)
                os.close(old)


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
    return log.read().decode("utf-8", "replace")


def about_size(size_bytes: int) -> str:
    """``1.5 GiB``, ``900 B``."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes} B"


def about_rate(bytes_per_s: float) -> str:
    """``12.3 GB/s``, in powers of ten as makers of memory and disks count."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.{0 if bytes_per_s >= 1e7 else 1}f} MB/s"


def about_time(seconds: float) -> str:
    """``1.25 s``, ``340 ms``, ``12 us``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.{0 if seconds >= 1e-2 else 1}f} ms"
    return f"{seconds * 1e6:.0f} us"


def ago(age_ns: int) -> str:
    """``3 h``; a time in the future, which a clock that was set back makes, is ``now``."""
    seconds = age_ns // 10**9
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return "now"
