"""How the cost per operation grows with the number of chunks (spec 14.4).

    python benchmarks/scale.py [--largest 1000000] [--disk-chunks 100000] [--plot scale.png]

Pools of 1,000 to ``--largest`` tiny chunks, all full: microseconds per chunk of a store that evicts
(with 1,000 chunks pinned, and without), of a lookup, and with 64 threads that look up at once;
bytes of process memory per chunk; and per chunk of a disk the time of a start. The figures are
those of the index, the policy and the allocator, since there is next to nothing to copy.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from kvkeep.backends.lease import Lease
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.bench.measure import Row, show
from kvkeep.keys import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.factory import initialize_allocator
from kvkeep.memory.ownership import References
from kvkeep.metrics import Metrics
from kvkeep.policy.names import create_policy
from kvkeep.testing import chunks
from kvkeep.testing.disk import make_disk

CHUNK_BYTES = 64
PROMPT = 64  # chunks of one prompt
THREADS = 64
ROUNDS = 200
#: What index, policy and allocator may take for one chunk.
MEMORY_BYTES = 1024
#: What a cost at the largest size may be of that at the smallest.
FLAT = 2.0


def key_of(number: int) -> ChunkKey:
    """The key with this number, spread as hashes are."""
    return ChunkKey((number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") * 4)


def prompt(number: int) -> list[ChunkKey]:
    """The keys of one prompt."""
    return [key_of(number * PROMPT + chunk) for chunk in range(PROMPT)]


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@dataclass(frozen=True)
class Costs:
    """Of one size of the pool: microseconds per chunk, and bytes per chunk."""

    chunks: int
    store_us: float
    store_pinned_us: float
    lookup_us: float
    threads_us: float
    chunk_bytes: float


class Pool:
    """A pool that is full of prompts."""

    def __init__(self, capacity: int, policy: str) -> None:
        """Fill it."""
        self.capacity = capacity
        before = resident_bytes()
        allocator = initialize_allocator(
            capacity * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, huge_pages=False
        )
        self.backend = LocalCPUBackend(allocator, create_policy(policy), metrics=Metrics())
        self.next_prompt = 0
        for _ in range(capacity // PROMPT):
            self.store()
        gc.collect()
        self.chunk_bytes = (resident_bytes() - before) / len(self.backend) - CHUNK_BYTES

    def store(self) -> None:
        """One more prompt, as a store does it: asked for, allocated, put."""
        keys = prompt(self.next_prompt)
        self.next_prompt += 1
        self.backend.batched_contains(keys)
        objs = self.backend.batched_allocate(
            (1, 1, CHUNK_BYTES),
            torch.uint8,
            PROMPT,
            MemoryFormat.OPAQUE_PAGES,
            busy_loop=False,
            protect=keys,
        )
        with References(objs or []) as held:
            if len(held.objects) != PROMPT:
                raise RuntimeError("there is no room although everything may be evicted")
            self.backend.batched_submit_put_task(keys, held.objects)
        self.backend.note_order(keys)

    def lookup(self, number: int) -> None:
        """One stored prompt, counted from the latest."""
        keys = prompt(self.next_prompt - 1 - number)
        if self.backend.batched_contains(keys) != PROMPT:
            raise RuntimeError("a stored prompt is missing")

    def costs(self) -> Costs:
        """Measure all."""
        store = per_chunk_us(self.store)
        recent = self.capacity // PROMPT // 4
        turns = iter(range(1 << 30))
        lookup = per_chunk_us(lambda: self.lookup(next(turns) % recent))
        threads = self._threads_us(recent)
        lease = Lease("pinned", time.monotonic() + 600)
        oldest = self.next_prompt - self.capacity // PROMPT + 1
        for number in range(oldest, oldest + max(1, min(1000, self.capacity // 4) // PROMPT)):
            self.backend.batched_contains(prompt(number), pin=lease)
        pinned = per_chunk_us(self.store)
        lease.release()
        return Costs(self.capacity, store, pinned, lookup, threads, self.chunk_bytes)

    def _threads_us(self, recent: int) -> float:
        """Microseconds per chunk when THREADS threads look up at once, in all."""

        def ask(first: int) -> None:
            for number in range(ROUNDS // 4):
                self.lookup((first + number) % recent)

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(THREADS)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.perf_counter() - begun) / (THREADS * (ROUNDS // 4) * PROMPT) * 1e6

    def close(self) -> None:
        """Give everything back."""
        self.backend.close()


def per_chunk_us(call: Callable[[], object]) -> float:
    """Microseconds per chunk of a call for one prompt: the median of several groups of calls."""
    groups = []
    for _ in range(7):
        begun = time.perf_counter()
        for _ in range(ROUNDS // 7):
            call()
        groups.append((time.perf_counter() - begun) / (ROUNDS // 7) / PROMPT * 1e6)
    return statistics.median(groups)


def disk_start_us(folder: Path, count: int) -> tuple[float, float]:
    """Microseconds per chunk of writing tiny chunks, and of the start that finds them."""
    batch = 1024
    allocator = initialize_allocator(2 * batch * chunks.CHUNK_BYTES, chunk_bytes=chunks.CHUNK_BYTES)
    pool = LocalCPUBackend(allocator, create_policy("lru"), metrics=Metrics())
    options = {"size_bytes": 1 << 40, "queue_bytes": 1 << 30, "stall_timeout_s": 60.0}
    disk = make_disk(pool, folder, **options)
    begun = time.perf_counter()
    for start in range(0, count, batch):
        keys = [key_of(number) for number in range(start, min(start + batch, count))]
        objs = pool.batched_allocate(
            chunks.SHAPE, chunks.DTYPE, len(keys), MemoryFormat.OPAQUE_PAGES
        )
        with References(objs or []) as held:
            disk.batched_submit_put_task(keys, held.objects)
            if not disk.flush(600):
                raise RuntimeError("the disk did not take the chunks in time")
    written_us = (time.perf_counter() - begun) / count * 1e6
    disk.close()
    begun = time.perf_counter()
    disk = make_disk(pool, folder, **options)
    started_us = (time.perf_counter() - begun) / count * 1e6
    found = len(disk.keys())
    disk.close()
    pool.close()
    if found != count:
        raise RuntimeError(f"the start found {found} chunks of {count}")
    return written_us, started_us


def measure(sizes: list[int], policy: str) -> list[Costs]:
    """Costs by size, in ascending order."""
    found = []
    for size in sizes:
        pool = Pool(size, policy)
        found.append(pool.costs())
        pool.close()
        del pool
        gc.collect()
    return found


def rows_of(found: list[Costs], disk: dict[int, tuple[float, float]]) -> list[Row]:
    """The largest size beside the smallest one; flat is a ratio of 1."""
    small, large = found[0], found[-1]

    def row(what: str, name: str, target: float | None) -> Row:
        ours, limit = getattr(large, name), getattr(small, name)
        return Row(what, ours, limit, "us", ours / limit, target)

    of = f"{large.chunks:,} chunks / {small.chunks:,}"
    rows = [
        row(f"evict and store a chunk: {of}", "store_us", FLAT),
        row(f"the same beside pinned chunks: {of}", "store_pinned_us", FLAT),
        row(f"look a chunk up: {of}", "lookup_us", FLAT),
        row(f"look a chunk up, {THREADS} threads: {of}", "threads_us", FLAT),
    ]
    beside = large.threads_us / large.lookup_us
    what = f"look a chunk up, {THREADS} threads / one"
    rows.append(Row(what, large.threads_us, large.lookup_us, "us", beside, FLAT))
    what = f"memory of a chunk in the index, {large.chunks:,} chunks"
    ratio = large.chunk_bytes / MEMORY_BYTES
    rows.append(Row(what, large.chunk_bytes, MEMORY_BYTES, "B", ratio, 1.0))
    if len(disk) > 1:
        few, many = min(disk), max(disk)
        ratio = disk[many][1] / disk[few][1]
        what = f"start with a chunk on disk: {many:,} chunks / {few:,}"
        rows.append(Row(what, disk[many][1], disk[few][1], "us", ratio, FLAT))
    return rows


def plot(found: list[Costs], path: Path) -> None:
    """Microseconds per chunk over the number of chunks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    lines = {
        "store_us": ("evict and store", "o"),
        "store_pinned_us": ("evict and store, 1,000 chunks pinned", "s"),
        "lookup_us": ("look up", "D"),
        "threads_us": (f"look up, {THREADS} threads at once", "^"),
    }
    sizes = [one.chunks for one in found]
    for name, (label, marker) in lines.items():
        axes.plot(sizes, [getattr(one, name) for one in found], marker=marker, label=label)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("chunks in the pool")
    axes.set_ylabel("microseconds per chunk")
    axes.set_title("What a chunk costs the index, the policy and the allocator")
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=150)


def rows(
    largest: int = 1_000_000, disk_chunks: int = 100_000, image: Path | None = None
) -> list[Row]:
    """All rows; the plot goes to ``image``."""
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= largest]
    found = measure(sizes, "reuse")
    if image is not None:
        plot(found, image)
    disk = {}
    for count in (disk_chunks // 10, disk_chunks):
        folder = Path(tempfile.mkdtemp(prefix="kvkeep-scale-"))
        try:
            disk[count] = disk_start_us(folder, count)
        finally:
            shutil.rmtree(folder)
    return rows_of(found, disk)


def main(
    largest: Annotated[int, typer.Option(help="Chunks of the largest pool.")] = 1_000_000,
    disk_chunks: Annotated[int, typer.Option(help="Chunks of the disk.")] = 100_000,
    image: Annotated[Path | None, typer.Option("--plot", help="PNG file to write.")] = None,
) -> None:
    """Measure how costs grow."""
    torch.set_num_threads(1)
    show(rows(largest, disk_chunks, image), Console())


if __name__ == "__main__":
    typer.run(main)
