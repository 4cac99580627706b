"""ChunkReader: reads one chunk into memory and verifies all of it. Runs in an I/O thread.

ChunkWriter: writes one chunk so that it appears whole or not at all. Runs in an I/O thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from dataclasses import dataclass

import numpy as np

from kvkeep.backends.disk.catalog import Catalog, FoundChunk, check_file, open_chunk, probe
from kvkeep.backends.disk.directory import TempFile
from kvkeep.backends.disk.files import cause_of, concerns_medium, read_fully, write_fully
from kvkeep.backends.disk.index import DiskEntry
from kvkeep.backends.io_pool import WriteThrottle
from kvkeep.backends.slow_tier import CircuitBreaker, load_piece_bytes, pieces
from kvkeep.codec.base import Codec
from kvkeep.codec.frame import (
    CODEC_RAW,
    HEADER_BYTES,
    ChunkMeta,
    FrameFault,
    FrameHeader,
    new_hasher,
    parse_header,
)
from kvkeep.codec.names import Encoded, decode_chunk, encode_chunk
from kvkeep.errors import BackendError, CodecError
from kvkeep.hashing import ChunkKey


class ChunkReader:
    """Loads chunks; what does not verify is removed and a miss."""

    def __init__(self, catalog: Catalog, breaker: CircuitBreaker) -> None:
        """Read what ``catalog`` knows, and tell ``breaker`` how the medium does."""
        self._catalog = catalog
        self._breaker = breaker

    def load(self, key: ChunkKey, meta: ChunkMeta, target: memoryview, used_ns: int) -> bool:
        """Fill ``target`` with a chunk. After False its content means nothing.

        Args:
            key: the chunk.
            meta: what the index said it is; ``target`` has its size.
            target: memory for the payload.
            used_ns: time of use to note at the file, which orders chunks after a restart.
        """
        catalog = self._catalog
        entry = catalog.index.start_reading(key)
        if entry is None:
            return False
        started = time.perf_counter()
        try:
            fault, inode = self._read(key, meta, target, used_ns)
        except OSError as error:
            catalog.reports.fault("get", cause_of(error))
            if error.errno == errno.EACCES:
                catalog.index.ban(key, entry)  # this file only; the medium itself answers
            elif concerns_medium(error):
                self._breaker.failed()
            return False
        finally:
            catalog.index.end_reading(entry)
        self._breaker.succeeded()
        if inode is None and fault is None:
            catalog.reports.fault("get", "missing")  # evicted by another process, or by hand
            catalog.index.forget(key, entry)
            return False
        if fault is not None:
            catalog.reports.fault("get", fault)
            catalog.discard(key, entry, inode=inode)
            return False
        catalog.reports.loaded(len(target), time.perf_counter() - started)
        return True

    def _read(
        self, key: ChunkKey, meta: ChunkMeta, target: memoryview, used_ns: int
    ) -> tuple[FrameFault | None, int | None]:
        """What is wrong with the file, and its inode (None: there is no file)."""
        io = self._catalog.io
        fd = open_chunk(io, self._catalog.directory, key)
        if fd is None or isinstance(fd, FrameFault):
            return fd, None
        try:
            there = os.fstat(fd)
            if not stat.S_ISREG(there.st_mode):
                return FrameFault.NOT_A_FILE, there.st_ino
            head = memoryview(bytearray(HEADER_BYTES))
            if read_fully(io, fd, [head]) < HEADER_BYTES:
                return FrameFault.TRUNCATED, there.st_ino
            header = parse_header(head)
            fault = header if isinstance(header, FrameFault) else None
            if not isinstance(header, FrameFault):
                fault = self._check_header(header, key, meta, there.st_size)
                fault = fault or self._read_payload(fd, header, target)
            if fault is None:
                with contextlib.suppress(OSError):  # a read-only file system can still be read
                    os.utime(fd, ns=(used_ns, used_ns))
            return fault, there.st_ino
        finally:
            io.close(fd)

    def _check_header(
        self, header: FrameHeader, key: ChunkKey, meta: ChunkMeta, file_bytes: int
    ) -> FrameFault | None:
        fault = check_file(header, key, file_bytes)
        if fault is None and header.identity != self._catalog.identity_digest:
            fault = FrameFault.WRONG_IDENTITY
        if fault is None and header.meta != meta:
            fault = FrameFault.WRONG_LAYOUT
        return fault

    def _read_payload(self, fd: int, header: FrameHeader, target: memoryview) -> FrameFault | None:
        if header.codec == CODEC_RAW:
            return self._fill(fd, header, target)
        # Shorter than the chunk, as every header that was parsed says, so the memory is bounded.
        encoded = np.empty(header.payload_bytes, np.uint8).data
        fault = self._fill(fd, header, encoded)
        if fault is None:
            try:
                decode_chunk(header.codec, encoded, target, header.meta)
            except CodecError:
                fault = FrameFault.CODEC
        return fault

    def _fill(self, fd: int, header: FrameHeader, target: memoryview) -> FrameFault | None:
        """Read the payload as it is stored."""
        hasher = new_hasher()
        for position, piece in pieces(target, HEADER_BYTES, load_piece_bytes(len(target))):
            done = read_fully(self._catalog.io, fd, [piece], HEADER_BYTES + position)
            if done < len(piece):
                return FrameFault.TRUNCATED
            hasher.update(piece)
        if hasher.digest() != header.payload_checksum:
            return FrameFault.PAYLOAD_CHECKSUM
        return None


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
        self, catalog: Catalog, breaker: CircuitBreaker, codec: Codec, courtesy: WriteThrottle
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
