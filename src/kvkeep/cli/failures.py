"""How every command ends when it cannot run: one message on standard error, exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvkeep.errors import KVKeepError


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
