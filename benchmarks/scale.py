"""How the cost per operation grows with the number of chunks (spec 14.4).

    python benchmarks/scale.py [--largest 1000000] [--disk-chunks 100000] [--plot scale.png]

Pools of 1,000 to ``--largest`` tiny chunks, all full, each with as many names of chunks that went
as its policy remembers: there is next to nothing to copy, so the figures are those of the index,
the policy and the allocator. Each size is built once, and all are measured in turn, so that what
else the machine does falls on all of them. A cost per operation is the least of :data:`BATCHES`
batches, since noise only adds to it; a pause of the garbage collector is a median. The keys of a
prompt are made before the clock starts. What needs a disk is in ``scale_disk.py``.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import scale_disk
import torch
import typer
from rich.console import Console

from kvkeep.backends.base import Lease
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.bench.measure import Row, seconds, show
from kvkeep.hashing import ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryAllocatorInterface, References
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.names import create_policy

T = TypeVar("T")

CHUNK_BYTES = 64
PROMPT = 64  # chunks of one prompt
LOOKUP = 512  # chunks of a long prompt: 131,072 tokens
THREADS = 64
BATCHES = 15
#: Prompts in a batch.
ROUNDS = 28
#: Names that a policy remembers at most of pools of up to a million chunks.
NAMES = 1_000_000
#: What index, policy and allocator may take for one chunk, names of those that went included.
MEMORY_BYTES = 1024
#: What a cost at the largest size may be of that at the smallest.
FLAT = 2.0
#: What a lookup may add to the time of its keys (spec 14.2), with pins and without.
LOOKUP_MS, PINNED_MS = 0.3, 1.0


def prompt(number: int, length: int = PROMPT) -> list[ChunkKey]:
    """The keys of one prompt."""
    return [scale_disk.key_of(number * PROMPT + chunk) for chunk in range(length)]


@dataclass(frozen=True)
class Costs:
    """Of one size of the pool: microseconds per chunk, milliseconds, bytes per chunk."""

    chunks: int
    store_us: float
    store_pinned_us: float
    policy_us: float
    allocator_us: float
    lookup_us: float
    threads_us: float
    lookup_ms: float
    pinned_lookup_ms: float
    pause_ms: float  # that a full collection of garbage takes longer with the pool
    idle_pause_ms: float
    chunk_bytes: float


class Pool:
    """A pool that is full of prompts."""

    def __init__(self, capacity: int, policy: str, *, turnovers: float) -> None:
        """Fill it, and store so many times as much again."""
        self.capacity = capacity
        gc.collect()
        before = scale_disk.resident_bytes()
        allocator = _allocator(capacity)
        self.backend = LocalCPUBackend(allocator, create_policy(policy), metrics=Metrics())
        self.next_prompt = 0
        for _ in range(int(capacity * (1 + turnovers)) // PROMPT):
            self.store(self.next_keys())
        gc.collect()
        used = scale_disk.resident_bytes() - before
        self.chunk_bytes = used / len(self.backend) - CHUNK_BYTES

    def next_keys(self) -> list[ChunkKey]:
        """One more prompt."""
        self.next_prompt += 1
        return prompt(self.next_prompt - 1)

    def store(self, keys: Sequence[ChunkKey]) -> None:
        """A prompt, as a store does it: asked for, allocated, put."""
        self.backend.batched_contains(keys)
        objs = self.backend.batched_allocate(
            (1, 1, CHUNK_BYTES),
            torch.uint8,
            len(keys),
            MemoryFormat.OPAQUE_PAGES,
            busy_loop=False,
            protect=keys,
        )
        with References(objs or []) as held:
            if len(held.objects) != len(keys):
                raise RuntimeError("there is no room although everything may be evicted")
            self.backend.batched_submit_put_task(keys, held.objects)
        self.backend.note_order(keys)

    def lookup(self, keys: Sequence[ChunkKey], pin: Lease | None = None) -> None:
        """A stored prompt."""
        if self.backend.batched_contains(keys, pin=pin) != len(keys):
            raise RuntimeError("a stored prompt is missing")

    def pinned_lookup(self, keys: Sequence[ChunkKey]) -> None:
        """A stored prompt, pinned and released."""
        lease = Lease("one", time.monotonic() + 600)
        self.lookup(keys, lease)
        lease.release()

    def stored(self, count: int, length: int = PROMPT) -> list[list[ChunkKey]]:
        """The keys of so many stored prompts, spread over the newer half of the pool."""
        newest, room = self.next_prompt - length // PROMPT, self.capacity // PROMPT // 2
        step = max(1, room // count)
        return [prompt(newest - number * step % room, length) for number in range(count)]

    def pin_oldest(self) -> Lease:
        """Pin a quarter of the pool, at most 1,000 chunks, where a search for victims begins."""
        lease = Lease("pinned", time.monotonic() + 600)
        oldest = self.next_prompt - self.capacity // PROMPT + 1
        for number in range(oldest, oldest + max(1, min(1000, self.capacity // 4) // PROMPT)):
            self.backend.batched_contains(prompt(number), pin=lease)
        return lease

    def threads_s(self) -> float:
        """Seconds in which THREADS threads look up ROUNDS prompts each."""
        keys = self.stored(ROUNDS)

        def ask() -> None:
            for one in keys:
                self.lookup(one)

        threads = [threading.Thread(target=ask) for _ in range(THREADS)]

        def run() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return seconds(run)

    def batch(self) -> Iterator[tuple[str, float]]:
        """One batch of everything but what needs pins: names of :class:`Costs` and values."""
        chunks = ROUNDS * PROMPT
        yield "store_us", _each(self.store, [self.next_keys() for _ in range(ROUNDS)]) / chunks
        yield "lookup_us", _each(self.lookup, self.stored(ROUNDS)) / chunks
        yield "threads_us", self.threads_s() * 1e6 / chunks / THREADS
        few = self.stored(4, LOOKUP)
        yield "lookup_ms", _each(self.lookup, few) / len(few) / 1e3
        yield "pinned_lookup_ms", _each(self.pinned_lookup, few) / len(few) / 1e3

    def pinned_batch(self) -> Iterator[tuple[str, float]]:
        """A batch of stores beside pins."""
        keys = [self.next_keys() for _ in range(ROUNDS)]
        yield "store_pinned_us", _each(self.store, keys) / ROUNDS / PROMPT

    def close(self) -> None:
        """Give everything back."""
        self.backend.close()


class PolicyAlone:
    """The policy without a pool: put a chunk, use another, choose one to evict, evict it."""

    def __init__(self, capacity: int, policy: str) -> None:
        """Know as many chunks."""
        self.policy = create_policy(policy)
        self.mapping = self.policy.init_mutable_mapping()
        self.next = 0
        for key in self._keys(capacity):
            self._put(key)

    def _keys(self, count: int) -> list[ChunkKey]:
        self.next += count
        return [scale_disk.key_of(number) for number in range(self.next - count, self.next)]

    def _put(self, key: ChunkKey) -> None:
        self.mapping[key] = True  # type: ignore[assignment]  # a policy never looks at the values
        self.policy.update_on_put(key)

    def _turn(self, key: ChunkKey) -> None:
        for victim in self.policy.get_evict_candidates(self.mapping, 1, bool):
            del self.mapping[victim]
            self.policy.update_on_force_evict(victim)
        self._put(key)
        self.policy.update_on_hit(key, self.mapping)

    def batch(self) -> Iterator[tuple[str, float]]:
        """One batch."""
        keys = self._keys(ROUNDS * PROMPT)
        yield "policy_us", _each(self._turn, keys) / len(keys)


class AllocatorAlone:
    """The allocator without a pool, its free slots scattered: take one, give it back."""

    def __init__(self, capacity: int) -> None:
        """Take all slots and give every fourth back."""
        self.allocator = _allocator(capacity)
        objs = self.allocator.batched_allocate((1, 1, CHUNK_BYTES), torch.uint8, capacity) or []
        self.held = References(objs[n] for n in range(capacity) if n % 4)
        References(objs[::4]).release()

    def _turn(self, count: int) -> None:
        References(
            self.allocator.batched_allocate((1, 1, CHUNK_BYTES), torch.uint8, count) or []
        ).release()

    def batch(self) -> Iterator[tuple[str, float]]:
        """One batch."""
        yield "allocator_us", _each(self._turn, [PROMPT] * ROUNDS) / ROUNDS / PROMPT

    def close(self) -> None:
        """Give everything back."""
        self.held.release()
        self.allocator.close()


def _allocator(capacity: int) -> MemoryAllocatorInterface:
    return initialize_allocator(capacity * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, huge_pages=False)


def _each(call: Callable[[T], object], arguments: Sequence[T]) -> float:
    """Microseconds for a call of each argument."""
    begun = time.perf_counter()
    for argument in arguments:
        call(argument)
    return (time.perf_counter() - begun) * 1e6


def least(parts: Sequence[Callable[[], Iterator[tuple[str, float]]]]) -> list[dict[str, float]]:
    """The least value of each cost over all batches, which are taken in turn."""
    found: list[dict[str, float]] = [{} for _ in parts]
    for _ in range(BATCHES):
        for batch, values in zip(parts, found, strict=True):
            gc.collect(1)
            for name, value in batch():
                values[name] = min(value, values.get(name, value))
    return found


def measure(sizes: Sequence[int], policy: str) -> list[Costs]:
    """Costs by size, in ascending order."""
    values: list[dict[str, float]] = [{} for _ in sizes]

    def take(parts: Sequence[Callable[[], Iterator[tuple[str, float]]]]) -> None:
        for one, more in zip(values, least(parts), strict=True):
            one.update(more)

    policies = [PolicyAlone(size, policy) for size in sizes]
    take([one.batch for one in policies])
    del policies
    allocators = [AllocatorAlone(size) for size in sizes]
    take([one.batch for one in allocators])
    for one in allocators:
        one.close()
    del allocators
    pools: list[Pool] = []
    for size, one in zip(sizes, values, strict=True):
        idle = _pause_ms()
        pools.append(Pool(size, policy, turnovers=min(8.0, NAMES / size)))
        one.update(idle_pause_ms=idle, pause_ms=max(0.0, _pause_ms() - idle))
    take([pool.batch for pool in pools])
    leases = [pool.pin_oldest() for pool in pools]
    take([pool.pinned_batch for pool in pools])
    for lease in leases:
        lease.release()
    costs = [
        Costs(pool.capacity, chunk_bytes=pool.chunk_bytes, **one)
        for pool, one in zip(pools, values, strict=True)
    ]
    for pool in pools:
        pool.close()
    return costs


def _pause_ms() -> float:
    """What a full collection of garbage takes: the median of seven."""
    return statistics.median(seconds(gc.collect) for _ in range(7)) * 1e3


def rows_of(found: Sequence[Costs]) -> list[Row]:
    """The largest size beside the smallest one; flat is a ratio of 1."""
    small, large = found[0], found[-1]
    of = f"{large.chunks:,} chunks / {small.chunks:,}"

    def growth(what: str, name: str, target: float | None) -> Row:
        ours, limit = getattr(large, name), getattr(small, name)
        return Row(f"{what}: {of}", ours, limit, "us", ours / limit, target)

    def bound(what: str, ours: float, limit: float, unit: str) -> Row:
        what = f"{what}, {large.chunks:,} chunks"
        return Row(what, ours, limit, unit, ours / limit, 1.0)

    beside = large.threads_us / large.lookup_us
    return [
        growth("evict and store a chunk", "store_us", FLAT),
        growth("the same beside pinned chunks", "store_pinned_us", FLAT),
        growth("policy alone: put, use, evict", "policy_us", FLAT),
        growth("allocator alone: take, give back", "allocator_us", FLAT),
        growth("look a chunk up (one access to memory)", "lookup_us", None),
        Row(
            f"look a chunk up, {THREADS} threads / one, {large.chunks:,} chunks",
            large.threads_us,
            large.lookup_us,
            "us",
            beside,
            FLAT,
        ),
        bound(f"look {LOOKUP} chunks up, without keys", large.lookup_ms, LOOKUP_MS, "ms"),
        bound("... with pin and release", large.pinned_lookup_ms, PINNED_MS, "ms"),
        bound("memory of a chunk in the index", large.chunk_bytes, MEMORY_BYTES, "B"),
        Row(
            f"full collection of garbage: {large.chunks:,} chunks / all else",
            large.pause_ms,
            small.idle_pause_ms,
            "ms",
            large.pause_ms / small.idle_pause_ms,
            None,
        ),
    ]


def plot(found: Sequence[Costs], path: Path) -> None:
    """Microseconds per chunk over the number of chunks, for light and dark pages."""
    from matplotlib.figure import Figure

    grey = "#7d8590"  # of the text: readable on white and on black
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    lines = (
        ("store_pinned_us", "evict and store, beside pinned chunks", "s", "#bf8700"),
        ("store_us", "evict and store", "o", "#d1574e"),
        ("policy_us", "policy alone: put, use, evict", "v", "#8a63d2"),
        ("allocator_us", "allocator alone: take, give back", "P", "#2f81f7"),
        ("threads_us", f"look up, {THREADS} threads at once", "^", "#1a9f8f"),
        ("lookup_us", "look up", "D", "#3f9142"),
    )
    sizes = [one.chunks for one in found]
    for name, label, marker, color in lines:
        values = [getattr(one, name) for one in found]
        axes.plot(sizes, values, marker=marker, color=color, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=axes.get_ylim()[1] * 12)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("chunks in the pool", color=grey)
    axes.set_ylabel("microseconds per chunk", color=grey)
    axes.tick_params(which="both", colors=grey)
    axes.grid(axis="y", color=grey, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(grey)
    axes.legend(frameon=False, labelcolor=grey, ncols=2, loc="upper left", fontsize="small")
    figure.savefig(path, format="png", dpi=150, transparent=True)


def rows(
    largest: int = 1_000_000, disk_chunks: int = 100_000, image: Path | None = None
) -> list[Row]:
    """All rows; the plot goes to ``image``, if matplotlib is here."""
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= largest]
    with tempfile.TemporaryDirectory(prefix="kvkeep-scale-") as folder:
        disk = scale_disk.rows(Path(folder), disk_chunks)
    found = measure(sizes, "reuse")
    if image is not None and importlib.util.find_spec("matplotlib") is not None:
        plot(found, image)
    return rows_of(found) + disk


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
