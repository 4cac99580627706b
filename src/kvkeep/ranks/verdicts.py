"""Verdicts: the one place where the outcome of a round is decided, by whoever comes first.

A message can be late, and a process can be stopped between reading the clock and acting on it, so
no exchange of messages lets all ranks agree. A symbolic link can: the system makes it whole or not
at all, with its content, and for one of those who try. Its name is the round, its target the
outcome. Callable from any thread and process of one machine.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvkeep.errors import RankError

#: Digits of the largest outcome that is believed.
_MAX_DIGITS = 18


class Verdicts:
    """The outcomes of one session's rounds."""

    def __init__(self, directory: Path, session: str) -> None:
        """Decide in ``directory``, which exists.

        Args:
            directory: private to the user, on a file system of this machine.
            session: names the life of the rank 0 that counts the rounds.
        """
        self._directory = directory
        self._session = session
        self._forgotten = 0

    def decide(self, seq: int, written: int) -> int:
        """The outcome of round ``seq``: ``written``, unless another one stands already.

        A directory that cannot be written decides nothing: the outcome is 0 then.
        """
        path = self._path(seq)
        with contextlib.suppress(OSError):
            os.symlink(str(written), path)
            return written
        return self.read(seq) or 0

    def read(self, seq: int) -> int | None:
        """The outcome of round ``seq`` if it stands already."""
        try:
            text = os.readlink(self._path(seq))
        except OSError:
            return None
        if not text.isascii() or not text.isdecimal() or len(text) > _MAX_DIGITS:
            return 0
        return int(text)

    def forget_before(self, seq: int) -> None:
        """Remove the outcomes of earlier rounds, which every rank knows by now."""
        for number in range(self._forgotten, seq):
            with contextlib.suppress(OSError):
                self._path(number).unlink()
        self._forgotten = max(self._forgotten, seq)

    def _path(self, seq: int) -> Path:
        return self._directory / f"{self._session}-{seq}"


def make_directory(directory: Path) -> None:
    """Make the directory of the verdicts anew, without what a killed rank 0 left in it.

    Raises:
        RankError: it cannot be made, or belongs to somebody else.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        info = directory.lstat()
        if not directory.is_dir() or directory.is_symlink() or info.st_uid != os.getuid():
            raise RankError(f"{directory} is no directory of user {os.getuid()}")
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RankError(f"cannot make the directory {directory}: {error}") from error


def remove_directory(directory: Path) -> None:
    """Remove the directory and the verdicts in it, as far as that is possible."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()
