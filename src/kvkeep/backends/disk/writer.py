"""ChunkWriter: writes one chunk so that it appears whole or not at all. Runs in an I/O thread."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from kvkeep.backends.disk.catalog import Catalog
from kvkeep.backends.disk.files import cause_of, concerns_medium, write_fully
from kvkeep.backends.disk.index import DiskEntry
from kvkeep.backends.disk.names import TempFile
from kvkeep.backends.disk.scan import FoundChunk, probe
from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.courtesy import Courtesy
from kvkeep.backends.io.pieces import pieces
from kvkeep.codec.base import Codec
from kvkeep.codec.frame import HEADER_BYTES, ChunkMeta, FrameFault, FrameHeader, new_hasher
from kvkeep.codec.names import Encoded, encode_chunk
from kvkeep.errors import BackendError
from kvkeep.keys import ChunkKey

#: How long one chunk gives way in all: longer than any copy takes, shorter than a stall.
_MAX_COURTESY_S = 0.5


@dataclass(frozen=True, slots=True)
class Pending:
    """A chunk to write.

    Attributes:
        key: the chunk.
        entry: its invisible entry in the index.
        payload: its bytes; they do not change while it is pending.
        used_ns: time of use to note at the file.
    """

    key: ChunkKey
    entry: DiskEntry
    payload: memoryview
    used_ns: int

    @property
    def meta(self) -> ChunkMeta:
        """What the bytes are."""
        return self.entry.meta


class ChunkWriter:
    """Stores chunks; a chunk that cannot be stored is dropped, and counted by cause."""

    def __init__(
        self, catalog: Catalog, breaker: Breaker, codec: Codec, courtesy: Courtesy
    ) -> None:
        """Write into ``catalog`` with ``codec``, and tell ``breaker`` how the medium does.

        Writing gives way to who is busy according to ``courtesy``.
        """
        self._catalog = catalog
        self._breaker = breaker
        self._codec = codec
        self._courtesy = courtesy

    def store(self, pending: Pending) -> bool:
        """Write a chunk; True if it can be read now."""
        catalog, started = self._catalog, time.perf_counter()
        try:
            cause = self._store(pending)
        except OSError as error:
            cause = cause_of(error)
            catalog.reports.fault("put", cause)
            if concerns_medium(error):
                self._breaker.failed()
        except BackendError:
            cause = "lock_timeout"
            catalog.reports.fault("put", cause)
            self._breaker.failed()
        else:
            self._breaker.succeeded()
        if cause is not None:
            catalog.index.forget(pending.key, pending.entry)
            catalog.reports.dropped(cause)
            return False
        catalog.reports.stored(len(pending.payload), time.perf_counter() - started)
        return True

    def _store(self, pending: Pending) -> str | None:
        """The cause for which the chunk was dropped; None if it is in."""
        catalog, key = self._catalog, pending.key
        if not catalog.index.is_current(key, pending.entry):
            return "removed"
        if self._is_there(pending):
            return None if catalog.index.finish(key, pending.entry) else "removed"
        self._courtesy.give_way(_MAX_COURTESY_S)
        encoded = encode_chunk(self._codec, pending.payload, pending.meta)
        temp = catalog.reserve(HEADER_BYTES + len(encoded.payload))
        if temp is None:
            return "no_room"
        try:
            self._write(pending, encoded, temp)
            if not catalog.index.is_current(key, pending.entry):
                catalog.directory.abort(temp)
                return "removed"
            catalog.directory.commit(temp, key)
        except (OSError, BackendError):
            catalog.directory.abort(temp)
            raise
        if catalog.index.finish(key, pending.entry):
            return None
        catalog.discard(key, inode=pending.entry.inode)  # removed after the rename
        return "removed"

    def _is_there(self, pending: Pending) -> bool:
        """Another process wrote the chunk already."""
        catalog = self._catalog
        found = probe(catalog.io, catalog.directory, pending.key)
        if isinstance(found, FrameFault):
            catalog.reports.fault("put", found)
            if found is FrameFault.NOT_A_FILE:  # a file is replaced by the rename
                with contextlib.suppress(OSError):
                    catalog.directory.remove(catalog.directory.chunk_path(pending.key))
        if not isinstance(found, FoundChunk) or catalog.index.is_banned(pending.key):
            return False
        pending.entry.inode = found.inode
        header = found.header
        return header.identity == catalog.identity_digest and header.meta == pending.meta

    def _write(self, pending: Pending, encoded: Encoded, temp: TempFile) -> None:
        io, hasher = self._catalog.io, new_hasher()
        payload = memoryview(encoded.payload)
        patience_s = _MAX_COURTESY_S
        fd = io.open_new(temp.path)
        try:
            for position, piece in pieces(payload, HEADER_BYTES):
                patience_s -= self._courtesy.give_way(patience_s)
                hasher.update(piece)
                write_fully(io, fd, [piece], HEADER_BYTES + position)
            header = FrameHeader(
                pending.key,
                self._catalog.identity_digest,
                pending.meta,
                len(payload),
                hasher.digest(),
                encoded.code,
            )
            write_fully(io, fd, [memoryview(header.pack())])
            os.utime(fd, ns=(pending.used_ns, pending.used_ns))
            pending.entry.inode = os.fstat(fd).st_ino
        finally:
            io.close(fd)
