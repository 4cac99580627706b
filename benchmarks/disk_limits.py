"""The disk tier against its limits, as ratios within one run (spec 14.5 and 14.6).

    python benchmarks/disk_limits.py --dir /some/disk

Each round does everything once, in turn; each ratio is the median over the rounds. Plain files are
written and read by as many threads, buffered and with O_DIRECT; cold means that the page cache was
told to forget the files. The share of checksums is what reading gets faster without them. The last
rows are the time of ``store()`` in the engine's thread, with a disk attached and without.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import mmap
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast
from unittest import mock

import numpy as np
import torch
import typer
from rich.console import Console

from kvkeep.backends.disk import chunk_files
from kvkeep.backends.disk.backend import DiskOptions, LocalDiskBackend
from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.backends.disk.index import DiskEntry
from kvkeep.bench.measure import Row, seconds, show, time_row
from kvkeep.bench.rig import TierChunks
from kvkeep.codec.names import codec_of
from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.memory.base import References
from kvkeep.metrics import Metrics
from kvkeep.policy.base import CachePolicy
from kvkeep.policy.classic import LRUPolicy

WAIT_S = 300.0
#: Hardware CRC-32C, to compare with (kvkeep has none); ``pip install google-crc32c``.
HAS_CRC32C = importlib.util.find_spec("google_crc32c") is not None
PIECE = 1 << 20


class Whatever:
    """A digest that equals every other one."""

    def __ne__(self, other: object) -> bool:
        return False


class NoHash:
    """Reads without a checksum."""

    def update(self, piece: memoryview) -> None:
        """Do nothing."""

    def digest(self) -> Whatever:
        """Right."""
        return Whatever()


class Crc32c(NoHash):
    """Hardware CRC-32C; the library takes no writable memory but for numpy's."""

    def __init__(self) -> None:
        self._crc = 0

    def update(self, piece: memoryview) -> None:
        """Take one more piece in."""
        import google_crc32c

        self._crc = google_crc32c.extend(self._crc, np.frombuffer(piece, np.uint8))


class DiskLimits:
    """One chunk size in one directory."""

    def __init__(self, root: Path, chunks: TierChunks, threads: int) -> None:
        self.root, self.chunks, self.threads = root, chunks, threads
        self.executor = ThreadPoolExecutor(threads)
        size = chunks.chunk_bytes
        self.aligned = [mmap.mmap(-1, size) for _ in range(threads)]
        for buffer in self.aligned:
            buffer.write(os.urandom(min(size, PIECE)) * (size // min(size, PIECE)))
        self.free = list(range(threads))

    # --- plain files ---

    def path(self, index: int) -> Path:
        """Of a plain file."""
        return self.root / "plain" / str(index)

    def each(self, work: Callable[[int], None]) -> float:
        """Seconds for all chunks, by the threads."""
        return seconds(lambda: list(self.executor.map(work, range(len(self.chunks.keys)))))

    def write_plain(self, *, direct: bool = False) -> float:
        """Seconds to write all chunks as plain files."""
        shutil.rmtree(self.root / "plain", ignore_errors=True)
        (self.root / "plain").mkdir()
        flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)

        def write(index: int) -> None:
            fd = os.open(self.path(index), flags, 0o600)
            if direct:
                buffer = self.free.pop()
                done = os.write(fd, self.aligned[buffer])
                self.free.append(buffer)
            else:
                done = os.write(fd, self.chunks.objs[index].byte_array)
            assert done == self.chunks.chunk_bytes
            os.close(fd)

        return self.each(write)

    def read_plain(self, *, direct: bool = False) -> float:
        """Seconds to read them."""
        targets = self.chunks.allocate(len(self.chunks.keys))
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)

        def read(index: int) -> None:
            fd = os.open(self.path(index), flags)
            if direct:
                buffer = self.free.pop()
                done = os.readv(fd, [self.aligned[buffer]])
                self.free.append(buffer)
            else:
                done = os.readv(fd, [targets[index].byte_array])
            assert done == self.chunks.chunk_bytes
            os.close(fd)

        took = self.each(read)
        References(targets).release()
        return took

    # --- the tier ---

    def open_tier(self, codec: str = "raw") -> LocalDiskBackend:
        """The tier over its own directory."""
        options = DiskOptions(
            self.root / "tier",
            1 << 40,
            codec=codec_of(codec, element="bfloat16"),
            threads=self.threads,
            queue_bytes=1 << 40,
            load_timeout_s=WAIT_S,
            stall_timeout_s=WAIT_S,
        )
        return LocalDiskBackend(
            options,
            identity=self.chunks.identity,
            allocator_backend=self.chunks.pool,
            policy=cast("CachePolicy[DiskEntry]", LRUPolicy()),
            metrics=Metrics(),
        )

    def write_tier(self, disk: LocalDiskBackend) -> float:
        """Seconds until all chunks are stored."""

        def write() -> None:
            disk.batched_submit_put_task(self.chunks.keys, self.chunks.objs)
            assert disk.flush(WAIT_S)

        return seconds(write)

    def read_tier(self, disk: LocalDiskBackend) -> float:
        """Seconds to load them."""
        held: list[Any] = []
        took = seconds(lambda: held.extend(disk.batched_get_blocking(self.chunks.keys)))
        assert None not in held
        References(held).release()
        return took

    def forget_pages(self) -> None:
        """Write everything out and let the page cache forget it."""
        os.sync()
        for path in self.root.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def close(self) -> None:
        """End the threads."""
        self.executor.shutdown()


def one_round(limits: DiskLimits, codecs: list[str]) -> dict[str, float]:
    """Seconds of everything once."""
    took = {"plain write, direct": limits.write_plain(direct=True)}
    os.sync()
    took["plain read, direct"] = limits.read_plain(direct=True)
    os.sync()
    took["plain write"] = limits.write_plain()
    os.sync()
    disk = limits.open_tier()
    took["write"] = limits.write_tier(disk)
    limits.forget_pages()
    took["plain read, cold"] = limits.read_plain()
    took["read, cold"] = limits.read_tier(disk)
    took["plain read, warm"] = limits.read_plain()
    took["read, warm"] = limits.read_tier(disk)
    with mock.patch.object(chunk_files, "new_hasher", NoHash):
        took["read without checksum"] = limits.read_tier(disk)
    if HAS_CRC32C:
        with mock.patch.object(chunk_files, "new_hasher", Crc32c):
            took["read with crc32c"] = limits.read_tier(disk)
    disk.close()
    shutil.rmtree(limits.root / "tier" / ROOT_NAME)
    for name in codecs:
        disk = limits.open_tier(name)
        took[f"{name} write"] = limits.write_tier(disk)
        took[f"{name} read, warm"] = limits.read_tier(disk)
        disk.close()
        shutil.rmtree(limits.root / "tier" / ROOT_NAME)
    return took


def measure_files(folder: Path, kib: int, total_mib: int, threads: int, rounds: int) -> list[Row]:
    """Rows of one chunk size."""
    codecs = ["zstd", "fp8"]
    root = Path(tempfile.mkdtemp(prefix=".kvkeep-limits-", dir=folder))
    try:
        with TierChunks(kib << 10, total_mib * 1024 // kib) as chunks:
            like_kv(chunks)
            limits = DiskLimits(root, chunks, threads)
            done = [one_round(limits, codecs) for _ in range(rounds + 1)][1:]
            limits.close()
            size = chunks.total_bytes
    finally:
        shutil.rmtree(root, ignore_errors=True)

    def row(what: str, ours: str, limit: str, target: float | None) -> Row:
        ratio = statistics.median(one[limit] / one[ours] for one in done)
        rates = [
            size / statistics.median(one[name] for one in done) / 1e9 for name in (ours, limit)
        ]
        return Row(f"{kib >> 10} MiB: {what}", rates[0], rates[1], "GB/s", ratio, target)

    return [
        row("write / plain files", "write", "plain write", 0.8),
        row("write / plain O_DIRECT", "write", "plain write, direct", None),
        row("read cold / plain files", "read, cold", "plain read, cold", 0.8),
        row("read cold / plain O_DIRECT", "read, cold", "plain read, direct", None),
        row("read warm / plain files", "read, warm", "plain read, warm", 0.8),
        row("read warm / without checksum", "read, warm", "read without checksum", 0.85),
        *(
            [row("... with CRC-32C / without", "read with crc32c", "read without checksum", None)]
            if HAS_CRC32C
            else []
        ),
        *(row(f"{name} write / raw", f"{name} write", "write", None) for name in codecs),
        *(
            row(f"{name} read warm / raw", f"{name} read, warm", "read, warm", None)
            for name in codecs
        ),
    ]


def like_kv(chunks: TierChunks) -> None:
    """Fill the chunks with bfloat16 numbers whose channels have different sizes, as KV has."""
    chance = torch.Generator().manual_seed(1)
    sizes = torch.exp(torch.randn(1024, generator=chance))
    for obj in chunks.objs:
        values = torch.from_numpy(obj.array).view(torch.bfloat16).view(-1, 1024)
        values.copy_(sizes * torch.randn(values.shape, generator=chance))


# --- store() in the engine's thread ---


@contextmanager
def engine(num_chunks: int, **extra: object) -> Iterator[tuple[CacheManager, torch.Tensor]]:
    """An engine of 32 layers with pages of 16 tokens, 8 KV heads of 128, bfloat16."""
    group = GroupLayout("full", 32, 16 * 2 * 8 * 128 * 2)
    layout = KVLayout(MemoryFormat.OPAQUE_PAGES, "uint8", 16, (group,), 0, 0, "benchmark")
    num_pages = num_chunks * 16
    caches = [torch.ones((num_pages, group.layer_page_bytes), dtype=torch.uint8) for _ in range(32)]
    connector = PagedGPUConnector(layout, huge_pages=True)
    connector.register_kv_caches(caches)
    size = 2 * num_chunks * layout.chunk_bytes(256)
    settings = load_settings(env={}, extra={"cpu.size": f"{size}B", "cpu.prefault": "0B", **extra})
    identity = CacheIdentity("benchmark", os.urandom(8).hex(), layout)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
    slots = (pages[:, None] * 16 + torch.arange(16)).reshape(-1).contiguous()
    with CacheManager.create(settings, identity, connector) as manager:
        yield manager, slots


def measure_store(folder: Path, num_tokens: int, rounds: int) -> list[Row]:
    """The time of store(), with an idle disk and with one that still writes what came before."""
    numbers = itertools.count()
    root = Path(tempfile.mkdtemp(prefix=".kvkeep-limits-", dir=folder))

    def store(made: tuple[CacheManager, torch.Tensor]) -> None:
        manager, slots = made
        first = next(numbers) * 7 + 1
        ids = np.arange(first, first + num_tokens, dtype=np.uint32)
        ids[0] = first << 8  # no prompt is the prefix of another
        done = manager.engine.store(ids, kvcaches=None, slot_mapping=slots[:num_tokens])
        assert done.num_copied_tokens == num_tokens

    def settled(made: tuple[CacheManager, torch.Tensor], *, busy: bool = False) -> float:
        """Seconds of one store; nothing else is under way, unless it is the store before."""
        for manager, _ in (with_disk, without):
            disk = manager.storage.storage_backends.get("LocalDiskBackend")
            if isinstance(disk, LocalDiskBackend):
                assert disk.flush(WAIT_S)
            manager.engine.clear()
        os.sync()
        gc.collect()
        if busy:
            store(made)
        return seconds(lambda: store(made))

    try:
        count = num_tokens // 256
        disk_settings = {"disk.path": str(root), "disk.size": "64GiB", "disk.queue": "8GiB"}
        with engine(count, **disk_settings) as with_disk, engine(count) as without:
            for made in (with_disk, without):
                settled(made, busy=True)  # touches all memory
            turns = [
                (settled(with_disk), settled(without), settled(with_disk, busy=True))
                for _ in range(rounds)
            ]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    name = f"store(), {num_tokens:,} tokens"
    idle, busy = [(a, b) for a, b, _ in turns], [(c, b) for _, b, c in turns]
    return [
        time_row(f"{name}: idle disk / no disk", idle, target=1.1),
        time_row(f"{name}: disk busy with the store before / no disk", busy, target=1.1),
    ]


def main(
    folder: Annotated[Path | None, typer.Option("--dir", help="On the disk to measure.")] = None,
    sizes: Annotated[str, typer.Option(help="Chunk sizes in KiB.")] = "4096,32768",
    total_mib: Annotated[int, typer.Option(help="Bytes per round.")] = 512,
    threads: Annotated[int, typer.Option(help="Threads for files, of both.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts.")] = 7,
    only_store: Annotated[bool, typer.Option(help="Only the time of store().")] = False,
) -> None:
    """Print one table."""
    torch.set_num_threads(1)
    where = folder or Path(tempfile.gettempdir())
    rows: list[Row] = []
    for kib in [] if only_store else map(int, sizes.split(",")):
        rows += measure_files(where, kib, total_mib, threads, rounds)
    for num_tokens in (1024, 4096):
        rows += measure_store(where, num_tokens, rounds)
    show(rows, Console())


if __name__ == "__main__":
    typer.run(main)
