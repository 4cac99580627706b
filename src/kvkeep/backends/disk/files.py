"""FileIO: the system calls of the disk tier, and loops that finish short reads and writes.

All calls block, so only the I/O threads and the opening of a directory use them. Fault tests derive
from :class:`FileIO` to make real calls fail, stall or do less than was asked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

#: Only the user who runs the engine may read a cache: it holds what prompts say.
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class FileIO:
    """One method per system call; stateless, callable from any thread."""

    def open_read(self, path: Path | str) -> int:
        """A descriptor for reading. Never waits for a writer, should it be a pipe."""
        return os.open(path, _READ_FLAGS)

    def open_new(self, path: Path) -> int:
        """A descriptor for writing a file that must not exist yet."""
        return os.open(path, _WRITE_FLAGS, FILE_MODE)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read into ``buffers``, possibly fewer than they hold; 0 at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes written, possibly fewer than ``buffers`` hold."""
        return os.pwritev(fd, buffers, offset)

    def close(self, fd: int) -> None:
        """Close a descriptor; a file system may report a failed write only here."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Replace ``target`` by ``source`` in one step."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)


def _advance(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``buffers`` after their first ``num_bytes`` bytes."""
    index = 0
    while index < len(buffers) and num_bytes >= len(buffers[index]):
        num_bytes -= len(buffers[index])
        index += 1
    rest = buffers[index:]
    if rest and num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest


def read_fully(io: FileIO, fd: int, buffers: Sequence[memoryview], offset: int = 0) -> int:
    """Fill all buffers from an offset in a file, in as many calls as it takes.

    Returns:
        Bytes read; fewer than the buffers hold only if the file ends before.
    """
    rest, position = [buffer.cast("B") for buffer in buffers], offset
    while rest:
        done = io.read(fd, rest, position)
        if done == 0:
            break
        position += done
        rest = _advance(rest, done)
    return position - offset


def write_fully(io: FileIO, fd: int, buffers: Sequence[memoryview], offset: int = 0) -> None:
    """Write all buffers at an offset in a file, in as many calls as it takes.

    Raises:
        OSError: the system refused, or took nothing although it was asked again.
    """
    rest, position = [buffer.cast("B") for buffer in buffers], offset
    while rest:
        done = io.write(fd, rest, position)
        if done == 0:
            raise OSError(errno.EIO, "the file system took no bytes")
        position += done
        rest = _advance(rest, done)


def cause_of(error: OSError) -> str:
    """The label under which a failed call is counted."""
    return _CAUSES.get(error.errno or 0, "io_error")


def concerns_medium(error: OSError) -> bool:
    """The call would fail for other files, too."""
    return error.errno not in _ONE_FILE


_ONE_FILE = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP)
_CAUSES = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "read_only",
    errno.ENOENT: "missing",
    errno.ENOTDIR: "not_a_directory",
    errno.EISDIR: "directory",
    errno.ELOOP: "symlink",
    errno.EMFILE: "too_many_files",
    errno.ENFILE: "too_many_files",
}
