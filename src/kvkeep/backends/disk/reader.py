"""ChunkReader: reads one chunk into memory and verifies all of it. Runs in an I/O thread."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time

import numpy as np

from kvkeep.backends.disk.catalog import Catalog
from kvkeep.backends.disk.files import cause_of, concerns_medium, read_fully
from kvkeep.backends.disk.scan import check_file, open_chunk
from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.pieces import load_piece_bytes, pieces
from kvkeep.codec.frame import (
    CODEC_RAW,
    HEADER_BYTES,
    ChunkMeta,
    FrameFault,
    FrameHeader,
    new_hasher,
    parse_header,
)
from kvkeep.codec.names import decode_chunk
from kvkeep.errors import CodecError
from kvkeep.keys import ChunkKey


class ChunkReader:
    """Loads chunks; what does not verify is removed and a miss."""

    def __init__(self, catalog: Catalog, breaker: Breaker) -> None:
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
