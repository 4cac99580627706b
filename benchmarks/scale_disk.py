"""How long a start of the disk tier takes with many chunks, for ``scale.py``.

Small chunk files are written as they stand on a disk, without the tier. The page cache is warm: the
figures are those of the tier, not of the disk. Starts of a small and of a large directory, and the
plain reading of as many headers, are taken in turn; medians of :data:`STARTS`.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from pathlib import Path

from kvkeep.backends.disk.directory import chunk_name
from kvkeep.backends.disk.files import FILE_MODE
from kvkeep.bench.measure import Row, seconds
from kvkeep.codec.frame import HEADER_BYTES, ChunkMeta, FrameHeader, checksum, writer_digest
from kvkeep.hashing import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.testing import chunks
from support.disk import IDENTITY, chunk_path, make_disk

STARTS = 7
#: What a start per chunk may take of that of a directory with a tenth of the chunks.
FLAT = 2.0
MEMORY_BYTES = 1024


def key_of(number: int) -> ChunkKey:
    """The key with this number, spread as hashes are."""
    return ChunkKey((number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") * 4)


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def write_chunks(folder: Path, count: int) -> None:
    """Make so many chunk files."""
    payload = bytes(chunks.CHUNK_BYTES)
    meta = ChunkMeta(MemoryFormat.OPAQUE_PAGES, "uint8", chunks.SHAPE)
    digest, payload_checksum = writer_digest(IDENTITY), checksum(payload)
    root = chunk_path(folder, key_of(0)).parent.parent
    for fan in range(256):
        (root / f"{fan:02x}").mkdir(parents=True)
    for number in range(count):
        key = key_of(number)
        header = FrameHeader(key, digest, meta, len(payload), payload_checksum)
        fd = os.open(root / chunk_name(key), os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        os.write(fd, header.pack() + payload)
        os.close(fd)


def read_plainly(folder: Path) -> None:
    """What no start can do without: list the files, and read the header of each."""
    root = chunk_path(folder, key_of(0)).parent.parent
    for fan in os.scandir(root):
        for entry in os.scandir(fan.path):
            fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            os.pread(fd, HEADER_BYTES, 0)
            os.close(fd)


class Start:
    """Starts of the tier over one directory."""

    def __init__(self, folder: Path, count: int) -> None:
        """Make the directory."""
        self.folder, self.count = folder, count
        self.pool = chunks.make_pool()
        self.chunk_bytes: list[float] = []
        self.start_s: list[float] = []
        self.plain_s: list[float] = []
        write_chunks(folder, count)

    def measure(self) -> None:
        """One start, and the plain reading."""
        self.plain_s.append(seconds(lambda: read_plainly(self.folder)))
        gc.collect()
        before = resident_bytes()
        begun = time.perf_counter()
        disk = make_disk(
            self.pool, self.folder, policy="reuse", size_bytes=1 << 40, open_timeout_s=600.0
        )
        self.start_s.append(time.perf_counter() - begun)
        self.chunk_bytes.append((resident_bytes() - before) / self.count)
        found = len(disk.keys())
        disk.close()
        if found != self.count:
            raise RuntimeError(f"the start found {found} chunks of {self.count}")


def rows(folder: Path, count: int) -> list[Row]:
    """Rows of a start with ``count`` chunks, and with a tenth of them."""
    few, many = Start(folder / "few", count // 10), Start(folder / "many", count)
    for _ in range(STARTS):
        few.measure()
        many.measure()
    for one in (few, many):
        one.pool.close()
    small, large = (statistics.median(one.start_s) / one.count * 1e6 for one in (few, many))
    start, plain = statistics.median(many.start_s), statistics.median(many.plain_s)
    ratio = statistics.median(
        ours / limit for ours, limit in zip(many.start_s, many.plain_s, strict=True)
    )
    # the first start: later ones reuse memory that the one before has left
    memory = many.chunk_bytes[0]
    return [
        Row(
            f"start with {count:,} chunks on disk / their headers read",
            start,
            plain,
            "s",
            ratio,
            None,
        ),
        Row(
            f"start, a chunk on disk: {count:,} chunks / {count // 10:,}",
            large,
            small,
            "us",
            large / small,
            FLAT,
        ),
        Row(
            f"memory of a chunk in the disk's index, {count:,} chunks",
            memory,
            MEMORY_BYTES,
            "B",
            memory / MEMORY_BYTES,
            1.0,
        ),
    ]
