"""replay_real: a workload through a real CacheEngine, with real bytes, at a smaller scale.

Each chunk has a few KiB instead of many MiB, and the tiers are as much smaller, so they hold as
many chunks as they would. What a chunk holds follows from its key; everything that is loaded is
compared with it. Token ids are made up from the keys: equal keys mean equal tokens with equal
predecessors, which is all that a cache can see of them. One thread calls; the disk tier has its
own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.backends.disk.backend import LocalDiskBackend
from kvkeep.codec.frame import HEADER_BYTES
from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.engine.engine import CacheEngine
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.replay.sweep import HitRate, Tally
from kvkeep.replay.trace import Trace, TraceRequest

#: Layers that the bytes of a chunk are divided into.
_LAYERS = 2
#: How long the disk tier has for a chunk; a busy machine is no reason to leave one out.
_DISK_TIMEOUT = "60s"
_FLUSH_S = 60.0
_LOOKUP_TIMEOUT, _LEASE = "60s", "300s"


@dataclass(frozen=True, slots=True)
class RealTiers:
    """What to build.

    Attributes:
        policy: of all tiers.
        memory_chunks: that the pool holds.
        disk_chunks: that the disk holds; 0 for no disk tier.
        disk_path: directory of the disk tier.
        chunk_bytes: of a chunk here; a multiple of 4096.
    """

    policy: str
    memory_chunks: int
    disk_chunks: int
    disk_path: Path | None
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class RealRun:
    """What came of it.

    Attributes:
        rate: what lookups found, warm-up left out.
        found_tokens: tokens that all lookups found, by tier.
        wrong_chunks: chunks whose bytes were not those of their tokens; must be 0.
        loaded_chunks: chunks that were loaded and compared.
        moved_bytes: copied into and out of the pool by the engine.
        seconds: in the engine, for all requests.
        failures: failed calls of a tier.
    """

    rate: HitRate
    found_tokens: dict[str, int]
    wrong_chunks: int
    loaded_chunks: int
    moved_bytes: int
    seconds: float
    failures: int


def replay_real(
    trace: Trace,
    tiers: RealTiers,
    report: Callable[[int, int, str], None],
    *,
    num_warm_up: int = 0,
) -> RealRun:
    """Run a workload through new tiers.

    Args:
        trace: the workload.
        tiers: what to build.
        report: told (requests done, requests in all, what runs) now and then.
        num_warm_up: requests at the start that are not counted in the hit rate.

    Raises:
        ConfigError: the settings that follow are impossible.
    """
    longest = max(len(request.keys) for request in trace.requests) or 1
    layout = KVLayout(
        MemoryFormat.OPAQUE_PAGES,
        "uint8",
        trace.chunk_tokens,
        (GroupLayout("full", _LAYERS, tiers.chunk_bytes // _LAYERS),),
        0,
        0,
        "kvkeep replay",
    )
    identity = CacheIdentity("replay", "1", layout, chunk_size=trace.chunk_tokens)
    connector = PagedGPUConnector(layout)
    pages = [
        torch.zeros((longest, tiers.chunk_bytes // _LAYERS), dtype=torch.uint8)
        for _ in range(_LAYERS)
    ]
    connector.register_kv_caches(pages)
    with CacheManager.create(
        load_settings(extra=_extra(trace, tiers)), identity, connector
    ) as made:
        run = _Run(made.engine, trace, [page.numpy() for page in pages], num_warm_up)
        for number, request in enumerate(trace.requests):
            if number % 50 == 0:
                report(number, len(trace.requests), f"{tiers.policy}, real bytes")
            run.serve(number, request)
            _let_the_disk_catch_up(made)
        return run.result(made.metrics.snapshot())


def _let_the_disk_catch_up(made: CacheManager) -> None:
    """Wait for what was stored: nothing is computed here that would give the disk its time."""
    for backend in made.storage.storage_backends.values():
        if isinstance(backend, LocalDiskBackend):
            backend.flush(_FLUSH_S)


class _Run:
    """One engine that serves one request after the other."""

    def __init__(
        self,
        engine: CacheEngine,
        trace: Trace,
        pages: list[npt.NDArray[np.uint8]],
        num_warm_up: int,
    ) -> None:
        self._engine = engine
        self._chunk_tokens = trace.chunk_tokens
        self._pages = pages
        self._tally = Tally(trace.chunk_tokens, num_warm_up)
        self._slots = torch.arange(len(pages[0]) * trace.chunk_tokens)
        self._seconds = 0.0
        self._wrong = self._loaded = 0

    def serve(self, number: int, request: TraceRequest) -> None:
        """Look up, load, compare, compute the rest, store."""
        if not request.keys:
            self._tally.count(request, 0)
            return
        tokens, wanted = self._tokens(request), self._bytes(request)
        slots = self._slots[: len(tokens)]
        for page in self._pages:
            page[: len(request.keys)] = 0
        begin = time.perf_counter()
        found = self._engine.lookup(tokens, lookup_id=str(number), pin=True)
        mask = self._engine.retrieve(tokens, kvcaches=None, slot_mapping=slots, req_id=str(number))
        self._seconds += time.perf_counter() - begin
        loaded = -(-int(mask.sum()) // self._chunk_tokens)
        self._tally.count(request, -(-found // self._chunk_tokens))
        self._loaded += loaded
        for layer, page in enumerate(self._pages):
            same = (page[:loaded] == wanted[:loaded] + np.uint8(layer)).all(axis=1)
            self._wrong += int((~same).sum())
            page[loaded : len(request.keys)] = wanted[loaded:] + np.uint8(layer)
        begin = time.perf_counter()
        self._engine.store(tokens, kvcaches=None, slot_mapping=slots)
        self._seconds += time.perf_counter() - begin

    def result(self, values: dict[str, float]) -> RealRun:
        """What came of all requests, with the engine's own numbers."""
        tiers = {
            name.split('"')[1]: int(value)
            for name, value in values.items()
            if name.startswith("kvkeep_lookup_hit_tokens_total")
        }
        moved = _sum(values, "kvkeep_transfer_bytes_sum", "LocalCPUBackend")
        evicted = int(_sum(values, "kvkeep_evictions_total", "LocalCPUBackend"))
        failures = int(_sum(values, "kvkeep_failures_total", ""))
        return RealRun(
            self._tally.hit_rate(evicted),
            tiers,
            self._wrong,
            self._loaded,
            int(moved),
            self._seconds,
            failures,
        )

    def _tokens(self, request: TraceRequest) -> npt.NDArray[np.uint32]:
        """Token ids uint32 [tokens of the chunks]: each chunk's own, repeated."""
        keys = np.frombuffer(b"".join(request.keys), "<u4").reshape(len(request.keys), -1)
        repeats = -(-self._chunk_tokens // keys.shape[1])
        tokens = np.tile(keys, (1, repeats))[:, : self._chunk_tokens].reshape(-1)
        return tokens[: request.num_tokens]

    def _bytes(self, request: TraceRequest) -> npt.NDArray[np.uint8]:
        """What each chunk holds in layer 0: uint8 [chunks, bytes of a page]; layer n has n more."""
        keys = np.frombuffer(b"".join(request.keys), np.uint8).reshape(len(request.keys), -1)
        return np.tile(keys, (1, self._pages[0].shape[1] // keys.shape[1]))


def _extra(trace: Trace, tiers: RealTiers) -> dict[str, object]:
    size = trace.chunk_tokens
    extra: dict[str, object] = {
        "chunk_size": size,
        # the last block of a recording may be shorter than the others
        "save_unfull_chunk": any(
            request.num_tokens < len(request.keys) * size for request in trace.requests
        ),
        "cpu.size": f"{tiers.memory_chunks * tiers.chunk_bytes}B",
        "cpu.policy": tiers.policy,
        "cpu.buffers": "0B",
        "lookup.timeout": _LOOKUP_TIMEOUT,
        "lookup.lease": _LEASE,
    }
    if tiers.disk_chunks and tiers.disk_path is not None:
        extra |= {
            "disk.path": str(tiers.disk_path),
            "disk.size": f"{tiers.disk_chunks * (tiers.chunk_bytes + HEADER_BYTES)}B",
            "disk.policy": tiers.policy,
            "disk.load_timeout": _DISK_TIMEOUT,
        }
    return extra


def _sum(values: dict[str, float], name: str, tier: str) -> float:
    return sum(value for full, value in values.items() if full.startswith(name) and tier in full)
