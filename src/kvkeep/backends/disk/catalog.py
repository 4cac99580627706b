"""Catalog: the index and the directory kept together.

Opening, probing, refreshing, evicting and removing: everything that changes both what this process
knows and what is on the disk. Every method blocks, except :meth:`Catalog.hide`, so only the I/O
threads use them.

The verified scan: which chunks a directory holds, read from their headers.

Nothing is believed that does not verify: what is below ``chunks`` and is no whole frame with its
own name is removed and reported by cause. Runs in an I/O thread, without the directory's lock:
files of other processes may come and go meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvkeep.backends.disk.directory import DiskDirectory, TempFile
from kvkeep.backends.disk.files import FileIO, cause_of, read_fully
from kvkeep.backends.disk.index import DiskEntry, DiskIndex, DiskReports
from kvkeep.codec.frame import HEADER_BYTES, FrameFault, FrameHeader, parse_header, writer_digest
from kvkeep.errors import BackendError
from kvkeep.hashing import ChunkKey
from kvkeep.identity import CacheIdentity


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


#: A refresh takes at most one part in this many of the time.
_REFRESH_SHARE = 20
_REFRESH_PAUSE_S = 5.0


class Catalog:
    """What is in the directory, as far as this process knows, and how it changes."""

    def __init__(
        self,
        directory: DiskDirectory,
        index: DiskIndex,
        *,
        identity: CacheIdentity,
        io: FileIO,
        reports: DiskReports,
    ) -> None:
        """Nothing is read before :meth:`open`.

        Args:
            directory: the files and their budget.
            index: empty.
            identity: the engine's; its frames carry the :attr:`identity_digest`.
            io: the system calls.
            reports: where faults are counted.
        """
        self.directory = directory
        self.index = index
        self._fmt = identity.layout.fmt
        self._page_bytes = identity.layout.page_bytes
        self.identity_digest = writer_digest(identity)
        self.io = io
        self.reports = reports
        self._scanner = Scanner(io, directory, lambda cause: reports.fault("scan", cause))
        self._refresh_lock = threading.Lock()
        self._next_refresh = 0.0  # guarded by _refresh_lock
        self._under_pressure = False  # a hint, written by any I/O thread

    def open(self) -> None:
        """Find what is there, remove what does not verify, and evict down to the budget.

        Raises:
            OSError, BackendError: the directory cannot be used.
        """
        self.directory.open()
        self._adopt(self._scanner.scan(self.index.is_listed))
        self.directory.trim(self.next_victim)

    def check(self) -> None:
        """Read something that must be there.

        Raises:
            OSError: the medium fails.
        """
        fd = self.io.open_read(self.directory.ledger_path)
        try:
            self.io.read(fd, [memoryview(bytearray(8))], 0)
        finally:
            self.io.close(fd)

    def probe_all(self, keys: Iterable[ChunkKey], *, stop_at_miss: bool) -> None:
        """Ask the disk for chunks that another process may have written, and adopt them.

        Args:
            keys: chunks; those known already are passed over.
            stop_at_miss: the rest is of no use after one that is not there.

        Raises:
            OSError: the medium fails.
        """
        for key in keys:
            if self.index.is_known(key):
                if stop_at_miss and self.index.find(key) is None:
                    return
                continue
            found = probe(self.io, self.directory, key)
            fault = found if isinstance(found, FrameFault) else self._fault_of(found)
            if fault is not None:
                self.reports.fault("lookup", fault)
                self.discard(key)
            elif found is not None and not isinstance(found, FrameFault):
                self._adopt([found])
                continue
            if stop_at_miss:
                return

    def next_victim(self) -> Path | None:
        """Path of the chunk to evict next; it is out of the index already."""
        self._under_pressure = True
        key = self.index.pop_victim()
        if key is None:
            return None
        self.reports.evicted()
        return self.directory.chunk_path(key)

    def reserve(self, size_bytes: int) -> TempFile | None:
        """Room for a file, made by eviction; None if nothing can be evicted for it.

        Raises:
            OSError, BackendError: see :meth:`DiskDirectory.reserve`.
        """
        if self._under_pressure and self.directory.is_shared:
            self.refresh()  # what others wrote may be older than what this process would evict
            self._under_pressure = False
        temp = self.directory.reserve(size_bytes, self.next_victim)
        if temp is None and self.refresh():
            temp = self.directory.reserve(size_bytes, self.next_victim)
        return temp

    def refresh(self) -> bool:
        """See what other processes added and removed; not again before a pause.

        Returns:
            False if nothing was done.

        Raises:
            OSError, BackendError: the directory cannot be read.
        """
        if not self._refresh_lock.acquire(blocking=False):
            return False
        try:
            started = time.monotonic()
            if started < self._next_refresh:
                return False
            self.index.keep_only(lambda key: self.directory.chunk_path(key).exists())
            self._adopt(self._scanner.scan(self.index.is_listed))
            self.directory.recount()
            seconds = time.monotonic() - started
            pause_s = max(_REFRESH_PAUSE_S, seconds * _REFRESH_SHARE)
            self._next_refresh = time.monotonic() + pause_s
            return True
        finally:
            self._refresh_lock.release()

    def hide(self, key: ChunkKey) -> DiskEntry | None:
        """Make a chunk invisible, without asking the disk; returns what stood for it."""
        return self.index.hide(key)

    def discard(
        self, key: ChunkKey, entry: DiskEntry | None = None, *, inode: int | None = None
    ) -> bool:
        """Remove a chunk from index and disk.

        Args:
            key: the chunk.
            entry: what stood for it in the index.
            inode: remove the file only if it is still this one.

        Returns:
            A file was removed. One that cannot be removed is counted, and never served again.
        """
        self.index.ban(key, entry)
        return self._remove_banned(key, inode=inode)

    def discard_hidden(self, key: ChunkKey) -> bool:
        """Remove the file of a hidden chunk, whoever wrote it; True if it went.

        Not if the chunk was put again since: then its file is, or will be, the new one.
        """
        return self._remove_banned(key, unless=lambda: self.index.is_wanted(key))

    def _remove_banned(
        self,
        key: ChunkKey,
        *,
        inode: int | None = None,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        path = self.directory.chunk_path(key)
        try:
            removed = self.directory.remove(path, inode=inode, unless=unless)
        except OSError as error:
            self.reports.fault("remove", cause_of(error))
            return False
        except BackendError:
            self.reports.fault("remove", "lock_timeout")
            return False
        self.index.unban(key)
        return removed

    def clear(self, hidden: Sequence[ChunkKey]) -> int:
        """Remove every chunk of this engine; returns how many files went.

        Args:
            hidden: chunks that were hidden for it; what else there is, is found here.

        Raises:
            OSError: the directory cannot be listed.
        """
        self._adopt(self._scanner.scan(self.index.is_listed))
        rest = self.index.keys()
        for key in rest:
            self.hide(key)
        return sum(self.discard_hidden(key) for key in [*hidden, *rest])

    def _adopt(self, found: Sequence[FoundChunk]) -> None:
        """Enter chunks; those of other engines are only evicted in their turn."""
        for chunk in found:
            fault = self._fault_of(chunk)
            if fault is FrameFault.WRONG_LAYOUT:
                self.reports.fault("scan", fault)
                self.discard(chunk.header.key, inode=chunk.inode)
            else:
                self.index.adopt(
                    chunk.header.key, chunk.header.meta, mine=fault is None, inode=chunk.inode
                )

    def _fault_of(self, chunk: FoundChunk | None) -> FrameFault | None:
        """Why this engine cannot serve a chunk that is whole."""
        if chunk is None:
            return None
        if chunk.header.identity != self.identity_digest:
            return FrameFault.WRONG_IDENTITY
        meta = chunk.header.meta
        if meta.fmt is not self._fmt or meta.size_bytes % self._page_bytes:
            return FrameFault.WRONG_LAYOUT
        return None
