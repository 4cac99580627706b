"""Catalog: the index and the directory kept together.

Opening, probing, refreshing, evicting and removing: everything that changes both what this process
knows and what is on the disk. Every method blocks, except :meth:`Catalog.hide`, so only the I/O
threads use them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvkeep.backends.disk.directory import DiskDirectory
from kvkeep.backends.disk.files import FileIO, cause_of
from kvkeep.backends.disk.index import DiskEntry, DiskIndex
from kvkeep.backends.disk.names import TempFile
from kvkeep.backends.disk.reports import DiskReports
from kvkeep.backends.disk.scan import FoundChunk, Scanner, probe
from kvkeep.codec.frame import FrameFault, writer_digest
from kvkeep.errors import BackendError
from kvkeep.identity import CacheIdentity
from kvkeep.keys import ChunkKey

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
