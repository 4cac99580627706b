"""The verified scan: which chunks a directory holds, read from their headers.

Nothing is believed that does not verify: what is below ``chunks`` and is no whole frame with its
own name is removed and reported by cause. Runs in an I/O thread, without the directory's lock:
files of other processes may come and go meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvkeep.backends.disk.directory import DiskDirectory
from kvkeep.backends.disk.files import FileIO, cause_of, read_fully
from kvkeep.codec.frame import HEADER_BYTES, FrameFault, FrameHeader, parse_header
from kvkeep.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """A chunk file whose header verified.

    Attributes:
        header: the header.
        inode: of the file.
        used_ns: when it was written or last loaded, by the file's modification time. It orders
            chunks for eviction and is trusted for nothing else.
    """

    header: FrameHeader
    inode: int
    used_ns: int


def probe(io: FileIO, directory: DiskDirectory, key: ChunkKey) -> FoundChunk | FrameFault | None:
    """Look at the file that has this chunk's name.

    Returns:
        The chunk; what is wrong with its file; or None if there is no file.

    Raises:
        OSError: the file is there and cannot be read.
    """
    fd = open_chunk(io, directory, key)
    if fd is None or isinstance(fd, FrameFault):
        return fd
    try:
        there = os.fstat(fd)
        if not stat.S_ISREG(there.st_mode):
            return FrameFault.NOT_A_FILE
        head = memoryview(bytearray(HEADER_BYTES))
        if read_fully(io, fd, [head]) < HEADER_BYTES:
            return FrameFault.TRUNCATED
    finally:
        io.close(fd)
    header = parse_header(head)
    if isinstance(header, FrameFault):
        return header
    fault = check_file(header, key, there.st_size)
    return fault or FoundChunk(header, there.st_ino, there.st_mtime_ns)


def open_chunk(
    io: FileIO, directory: DiskDirectory, key: ChunkKey
) -> int | Literal[FrameFault.NOT_A_FILE] | None:
    """A descriptor of the chunk's file; None if there is none."""
    try:
        return io.open_read(directory.chunk_location(key))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
            return FrameFault.NOT_A_FILE
        raise


def check_file(header: FrameHeader, key: ChunkKey, size_bytes: int) -> FrameFault | None:
    """What is wrong with a whole header in a file of this size under this chunk's name."""
    if header.key != key:
        return FrameFault.WRONG_KEY
    if size_bytes < HEADER_BYTES + header.payload_bytes:
        return FrameFault.TRUNCATED
    if size_bytes > HEADER_BYTES + header.payload_bytes:
        return FrameFault.LENGTH
    return None


class Scanner:
    """Goes through a directory and keeps only what verifies."""

    def __init__(
        self, io: FileIO, directory: DiskDirectory, on_fault: Callable[[str], None]
    ) -> None:
        """Ready to scan.

        Args:
            io: the system calls.
            directory: where to look.
            on_fault: called with the cause, once per file that is no good.
        """
        self._io = io
        self._directory = directory
        self._on_fault = on_fault

    def scan(self, known: Callable[[ChunkKey], bool]) -> list[FoundChunk]:
        """Every chunk that ``known`` does not know, the one unused for longest first.

        Raises:
            OSError: the directory cannot be listed.
        """
        found: list[FoundChunk] = []
        for key, entry in self._directory.list_files():
            if key is None:
                self._discard(entry, "stranger")
            elif not known(key):
                result = self._look(key, entry)
                if result is not None:
                    found.append(result)
        found.sort(key=lambda chunk: (chunk.used_ns, chunk.header.key))
        return found

    def _look(self, key: ChunkKey, entry: os.DirEntry[str]) -> FoundChunk | None:
        try:
            result = probe(self._io, self._directory, key)
        except OSError as error:
            # Unreadable is not the same as damaged: it stays, is accounted, and is not served.
            self._on_fault(cause_of(error))
            return None
        if isinstance(result, FrameFault):
            self._discard(entry, result)
            return None
        return result

    def _discard(self, entry: os.DirEntry[str], cause: str) -> None:
        self._on_fault(cause)
        try:
            self._directory.remove(Path(entry.path), inode=entry.inode())
        except OSError as error:
            self._on_fault(f"remove_{cause_of(error)}")
