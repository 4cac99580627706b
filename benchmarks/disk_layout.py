"""Which layout for the disk tier: a file per chunk, or segment files? Buffered, or O_DIRECT?

Run by hand (it decides nothing at run time; docs/adr/0010 records what it showed):

    python benchmarks/disk_layout.py --dir /some/disk --total-mib 256

For each chunk size it writes and reads the same bytes through each layout with a pool of threads
and prints the rate as a ratio to the plain rate: the same threads writing and reading one
preallocated file per thread with the same call size. ``cold`` reads follow a flush and
POSIX_FADV_DONTNEED, ``warm`` reads find the page cache. It also times removing every chunk (unlink,
or punching a hole into a segment).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

HEADER_BYTES = 4096
SEGMENT_BYTES = 128 << 20
PUNCH_HOLE_KEEP_SIZE = 0x3


def aligned(num_bytes: int) -> memoryview:
    """A page-aligned buffer, as the pool hands out."""
    return memoryview(mmap.mmap(-1, num_bytes))


def write_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Write all buffers at an offset, whatever the system does in one call."""
    while buffers:
        done = os.pwritev(fd, buffers, offset)
        offset += done
        while buffers and done >= len(buffers[0]):
            done -= len(buffers[0])
            buffers = buffers[1:]
        if buffers and done:
            buffers = [buffers[0][done:], *buffers[1:]]


def read_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Fill all buffers from an offset."""
    while buffers:
        done = os.preadv(fd, buffers, offset)
        if done == 0:
            raise EOFError("file is shorter than its chunk")
        offset += done
        while buffers and done >= len(buffers[0]):
            done -= len(buffers[0])
            buffers = buffers[1:]
        if buffers and done:
            buffers = [buffers[0][done:], *buffers[1:]]


@dataclass
class Place:
    """Where a layout keeps chunk ``index``."""

    path: Path
    offset: int


class Layout:
    """One way to keep chunks; ``direct`` opens with O_DIRECT."""

    def __init__(self, root: Path, chunk_bytes: int, count: int, *, direct: bool) -> None:
        self.root, self.chunk_bytes, self.count = root, chunk_bytes, count
        self.flags = os.O_DIRECT if direct else 0
        self.stride = HEADER_BYTES + chunk_bytes

    def write(self, index: int, header: memoryview, payload: memoryview) -> None:
        """Make chunk ``index`` durable against a kill of the process."""
        raise NotImplementedError

    def place(self, index: int) -> Place:
        """Where it is."""
        raise NotImplementedError

    def remove(self, index: int) -> None:
        """Give its bytes back to the file system."""
        raise NotImplementedError

    def read(self, index: int, header: memoryview, payload: memoryview) -> None:
        """Read chunk ``index`` whole."""
        place = self.place(index)
        fd = os.open(place.path, os.O_RDONLY | self.flags)
        try:
            read_all(fd, [header, payload], place.offset)
        finally:
            os.close(fd)


class FilePerChunk(Layout):
    """A temporary file, renamed into one of 256 directories."""

    def __init__(self, root: Path, chunk_bytes: int, count: int, *, direct: bool) -> None:
        super().__init__(root, chunk_bytes, count, direct=direct)
        for name in range(256):
            (root / f"{name:02x}").mkdir()

    def place(self, index: int) -> Place:
        """Where it is."""
        return Place(self.root / f"{index % 256:02x}" / f"{index:08x}.kvc", 0)

    def write(self, index: int, header: memoryview, payload: memoryview) -> None:
        """Write it."""
        temp = self.root / f"{index}.tmp"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self.flags, 0o600)
        try:
            write_all(fd, [header, payload], 0)
        finally:
            os.close(fd)
        os.rename(temp, self.place(index).path)

    def remove(self, index: int) -> None:
        """Give its bytes back."""
        os.unlink(self.place(index).path)


class Segments(Layout):
    """Segment files; chunks are appended and removed by punching holes."""

    def place(self, index: int) -> Place:
        """Where it is."""
        per_segment = max(1, SEGMENT_BYTES // self.stride)
        return Place(
            self.root / f"{index // per_segment:06d}.seg", index % per_segment * self.stride
        )

    def write(self, index: int, header: memoryview, payload: memoryview) -> None:
        """Write it."""
        place = self.place(index)
        fd = os.open(place.path, os.O_WRONLY | os.O_CREAT | self.flags, 0o600)
        try:
            write_all(fd, [header, payload], place.offset)
        finally:
            os.close(fd)

    def remove(self, index: int) -> None:
        """Give its bytes back."""
        place = self.place(index)
        fd = os.open(place.path, os.O_RDWR)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            code = libc.fallocate(
                fd, PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(place.offset), ctypes.c_long(self.stride)
            )
            if code:
                raise OSError(ctypes.get_errno(), "punching a hole failed")
        finally:
            os.close(fd)


class Plain(Segments):
    """The yardstick: the same calls on one large file per 128 MiB that exists already."""

    def __init__(self, root: Path, chunk_bytes: int, count: int, *, direct: bool) -> None:
        super().__init__(root, chunk_bytes, count, direct=direct)
        for path in {self.place(index).path for index in range(count)}:
            with path.open("wb") as file:
                file.truncate(SEGMENT_BYTES + self.stride)


def forget_pages(root: Path) -> None:
    """Flush and drop the page cache of every file below ``root``."""
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def rate(pool: ThreadPoolExecutor, task: Callable[[int], None], order: list[int]) -> float:
    """Chunks per second of a task over all chunks."""
    started = time.perf_counter()
    list(pool.map(task, order))
    return len(order) / (time.perf_counter() - started)


def measure(layout: Layout, pool: ThreadPoolExecutor, threads: int) -> dict[str, float]:
    """MB/s written and read (cold, warm), and microseconds to remove a chunk."""
    size = layout.chunk_bytes
    source = aligned(size)
    np.frombuffer(source, dtype=np.uint8)[:] = np.random.default_rng(1).integers(
        0, 256, size, dtype=np.uint8
    )
    header = aligned(HEADER_BYTES)
    targets = [(aligned(HEADER_BYTES), aligned(size)) for _ in range(threads * 2)]
    want = xxhash.xxh3_64_intdigest(source)

    def write(index: int) -> None:
        layout.write(index, header, source)

    def read(index: int) -> None:
        target = targets.pop()
        layout.read(index, *target)
        targets.append(target)

    order = list(range(layout.count))
    megabytes = size / 1e6
    result = {"write": rate(pool, write, order) * megabytes}
    started = time.perf_counter()
    forget_pages(layout.root)
    result["flush_s"] = time.perf_counter() - started
    shuffled = random.Random(1).sample(order, len(order))
    result["cold"] = rate(pool, read, shuffled) * megabytes
    result["warm"] = rate(pool, read, shuffled) * megabytes
    if any(
        xxhash.xxh3_64_intdigest(payload) not in (want, xxhash.xxh3_64_intdigest(bytes(size)))
        for _, payload in targets
    ):
        raise ValueError("a layout returned other bytes than were written")
    result["remove_us"] = 1e6 / rate(pool, layout.remove, order)
    return result


def main() -> None:
    """Measure every layout at every size and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--total-mib", type=int, default=256, help="bytes per layout and size")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=[64, 1024, 8192, 32768])
    args = parser.parse_args()
    kinds: list[tuple[str, type[Layout], bool]] = [
        ("plain", Plain, False),
        ("plain direct", Plain, True),
        ("file", FilePerChunk, False),
        ("file direct", FilePerChunk, True),
        ("segment", Segments, False),
        ("segment direct", Segments, True),
    ]
    print("| chunk | layout | write MB/s | cold read MB/s | warm read MB/s | remove us | flush s |")
    print("|---|---|---|---|---|---|---|")
    with ThreadPoolExecutor(args.threads) as pool:
        for kib in args.sizes_kib:
            count = max(4, args.total_mib * 1024 // kib)
            for label, kind, direct in kinds:
                root = Path(tempfile.mkdtemp(prefix="kvkeep-layout-", dir=args.dir))
                try:
                    layout = kind(root, kib << 10, count, direct=direct)
                    r = measure(layout, pool, args.threads)
                    rates = " | ".join(
                        f"{r[name]:.0f}" for name in ("write", "cold", "warm", "remove_us")
                    )
                    print(f"| {kib} KiB | {label} | {rates} | {r['flush_s']:.2f} |", flush=True)
                finally:
                    shutil.rmtree(root)


if __name__ == "__main__":
    main()
