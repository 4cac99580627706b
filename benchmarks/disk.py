"""How fast is the disk tier, against plain files with as many threads? (spec 14.5 and 14.6).

    python benchmarks/disk.py --dir /some/disk --total-mib 512

Writes the same bytes as files with a thread pool (one ``write`` each, no header, no checksum, no
rename) and through LocalDiskBackend, reads both back, and prints rates and their ratio; rounds
alternate, and the middle one of each counts. Then the share of the checksums, and how long a start
takes per chunk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kvkeep.backends.disk.names import ROOT_NAME
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.backends.local_disk import LocalDiskBackend
from kvkeep.codec.frame import checksum
from kvkeep.layout import GroupLayout, MemoryFormat
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.factory import initialize_allocator
from kvkeep.memory.ownership import References
from kvkeep.metrics import Metrics
from kvkeep.policy.lru import LRUPolicy
from kvkeep.testing.chunks import make_keys
from kvkeep.testing.disk import IDENTITY, make_disk


class Bench:
    """One chunk size, one directory."""

    def __init__(self, root: Path, chunk_bytes: int, count: int, threads: int) -> None:
        self.root, self.chunk_bytes, self.threads = root, chunk_bytes, threads
        self.keys = make_keys(count)
        self.shape = (1, 1, chunk_bytes)
        self.identity = replace(
            IDENTITY,
            layout=replace(IDENTITY.layout, groups=(GroupLayout("full", 1, chunk_bytes),)),
        )
        # Chunks written and chunks read: nothing is evicted while it is measured.
        allocator = initialize_allocator(2 * count * chunk_bytes, chunk_bytes=chunk_bytes)
        self.pool = LocalCPUBackend(allocator, LRUPolicy(), metrics=Metrics())
        self.objs = self._allocate(count)
        chance = np.random.default_rng(1)
        for obj in self.objs:
            obj.array[:] = chance.integers(0, 256, chunk_bytes, dtype=np.uint8)
        References(self._allocate(count)).release()  # commits the memory that is read into
        self.executor = ThreadPoolExecutor(threads)

    def _allocate(self, count: int) -> list[MemoryObj]:
        objs = self.pool.batched_allocate(self.shape, torch.uint8, count, MemoryFormat.OPAQUE_PAGES)
        assert objs is not None
        return objs

    def rate(self, started: float) -> float:
        """GB/s since ``started`` for all chunks."""
        return len(self.keys) * self.chunk_bytes / (time.perf_counter() - started) / 1e9

    def open(self) -> LocalDiskBackend:
        """The tier, over its own directory."""
        return make_disk(
            self.pool,
            self.root / "tier",
            identity=self.identity,
            size_bytes=1 << 40,
            queue_bytes=1 << 40,
            threads=self.threads,
            load_timeout_s=60.0,
            stall_timeout_s=60.0,
        )

    def plain(self) -> tuple[float, float]:
        """GB/s written and read with plain files."""
        folder = self.root / "plain"
        folder.mkdir()

        def write(index: int) -> None:
            fd = os.open(folder / str(index), os.O_WRONLY | os.O_CREAT, 0o600)
            assert os.write(fd, self.objs[index].byte_array) == self.chunk_bytes
            os.close(fd)

        started = time.perf_counter()
        list(self.executor.map(write, range(len(self.keys))))
        written = self.rate(started)
        targets = self._allocate(len(self.keys))

        def read(index: int) -> None:
            fd = os.open(folder / str(index), os.O_RDONLY)
            assert os.readv(fd, [targets[index].byte_array]) == self.chunk_bytes
            os.close(fd)

        started = time.perf_counter()
        list(self.executor.map(read, range(len(self.keys))))
        rates = written, self.rate(started)
        References(targets).release()
        shutil.rmtree(folder)
        return rates

    def tier(self) -> tuple[float, float, float]:
        """GB/s written and read with the tier, and microseconds per chunk at a start."""
        disk = self.open()
        started = time.perf_counter()
        disk.batched_submit_put_task(self.keys, self.objs)
        assert disk.flush(600)
        written = self.rate(started)
        disk.close()
        started = time.perf_counter()
        disk = self.open()
        start_us = (time.perf_counter() - started) / len(self.keys) * 1e6
        started = time.perf_counter()
        with References(disk.batched_get_blocking(self.keys)) as held:
            rates = written, self.rate(started), start_us
            assert len(held.objects) == len(self.keys)
        disk.close()
        shutil.rmtree(self.root / "tier" / ROOT_NAME)
        return rates

    def close(self) -> None:
        """Give everything back."""
        References(self.objs).release()
        self.pool.close()
        self.executor.shutdown()


def main() -> None:
    """Print one row per chunk size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=[1024, 4096, 32768])
    args = parser.parse_args()
    print("| chunk | plain write | tier write | ratio | plain read | tier read | ratio | start |")
    print("|---|---|---|---|---|---|---|---|")
    for kib in args.sizes_kib:
        root = Path(tempfile.mkdtemp(prefix="kvkeep-disk-", dir=args.dir))
        bench = Bench(root, kib << 10, args.total_mib * 1024 // kib, args.threads)
        try:
            rounds = [(*bench.plain(), *bench.tier()) for _ in range(args.rounds)]
        finally:
            bench.close()
            shutil.rmtree(root)
        columns = zip(*rounds, strict=True)
        plain_w, plain_r, tier_w, tier_r, start_us = map(statistics.median, columns)
        print(
            f"| {kib} KiB | {plain_w:.2f} GB/s | {tier_w:.2f} | {tier_w / plain_w:.0%} "
            f"| {plain_r:.2f} GB/s | {tier_r:.2f} | {tier_r / plain_r:.0%} | {start_us:.0f} us |",
            flush=True,
        )
    data = np.random.default_rng(1).integers(0, 256, 32 << 20, dtype=np.uint8)
    started = time.perf_counter()
    for _ in range(10):
        checksum(memoryview(data))
    seconds = time.perf_counter() - started
    print(f"checksum: {10 * data.nbytes / seconds / 1e9:.1f} GB/s per thread")


if __name__ == "__main__":
    main()
