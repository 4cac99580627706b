"""What loading together costs: the same load on one rank alone, and on several that must agree.

Prints, per kind of group, the median time of a load on rank 0 and its ratio to that of one rank
alone, with chunks of 1 MiB. ``python benchmarks/ranks.py [CHUNKS [RANKS]]``
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.memory.placement import WorkerPlace
from kvkeep.testing.chunks import wait_until
from support.paged_engine import PagedEngine

TURNS, CHUNK, PAGE, LAYERS = 60, 256, 16, 16
PAGE_BYTES = (1 << 20) // (CHUNK // PAGE) // LAYERS


def start(rank: int, num_ranks: int, num_chunks: int, *, is_shared: bool, folder: Path):
    """One rank: its cache, its pages and a function that loads."""
    model = PagedEngine(
        num_pages=num_chunks * CHUNK // PAGE,
        num_layers=LAYERS,
        page_size=PAGE,
        page_bytes=PAGE_BYTES,
    )
    settings = load_settings(
        extra={"cpu.size": (num_chunks + 2) << 20, "cpu.buffers": "0B", "cpu.prefault": "0B"}
    )
    own = not is_shared and num_ranks > 1
    identity = CacheIdentity(
        "m", "1", model.layout, CHUNK, rank if own else 0, num_ranks if own else 1
    )
    place = WorkerPlace(
        rank, num_ranks, num_ranks, has_same_kv=is_shared, first_rank_only=is_shared
    )
    connector = PagedGPUConnector(model.layout)
    manager = CacheManager.create(
        settings, identity, connector, place=place, ranks_socket=folder / "ranks.sock"
    )
    tokens = list(range(num_chunks * CHUNK))
    slots = torch.arange(len(tokens))
    manager.engine.store(tokens, kvcaches=model.caches, slot_mapping=slots)

    def load(number: int) -> float:
        started = time.perf_counter()
        mask = manager.engine.retrieve(
            tokens, kvcaches=model.caches, slot_mapping=slots, req_id=str(number)
        )
        assert mask.all()
        return time.perf_counter() - started

    return manager, load


def follow(rank: int, num_ranks: int, num_chunks: int, is_shared: bool, folder: str) -> None:
    """The process of another rank: loads until it is told to end."""
    manager, load = start(rank, num_ranks, num_chunks, is_shared=is_shared, folder=Path(folder))
    print("ready", flush=True)
    for number in range(TURNS):
        sys.stdin.readline()
        load(number)
    manager.close()


def measure(num_ranks: int, num_chunks: int, *, is_shared: bool) -> float:
    """Median seconds of a load on rank 0."""
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        manager, load = start(0, num_ranks, num_chunks, is_shared=is_shared, folder=Path(folder))
        others = []
        for rank in range(1, num_ranks):
            arguments = f"{rank}, {num_ranks}, {num_chunks}, {is_shared}, {folder!r}"
            code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            code += f"import ranks; ranks.follow({arguments})"
            others.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for other in others:
            assert other.stdout.readline() == "ready\n"
        if manager.engine._parts.ranks is not None:
            wait_until(manager.engine._parts.ranks.is_whole)
        times = []
        for number in range(TURNS):
            for other in others:
                other.stdin.write("go\n")
                other.stdin.flush()
            threading.Event().wait(0.005)  # engines arrive together
            times.append(load(number))
        for other in others:
            other.stdin.close()
            other.wait()
        manager.close()
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    num_chunks = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    num_ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    alone = measure(1, num_chunks, is_shared=False)
    print(f"{num_chunks} chunks of 1 MiB, {num_ranks} ranks, median of {TURNS} loads on rank 0")
    print(f"{'one rank alone':32} {alone * 1e3:8.2f} ms  1.00")
    for is_shared, name in ((False, "each its own chunks"), (True, "rank 0's chunks for all")):
        seconds = measure(num_ranks, num_chunks, is_shared=is_shared)
        print(f"{name:32} {seconds * 1e3:8.2f} ms  {seconds / alone:.2f}")


if __name__ == "__main__":
    main()
