"""A lookup target that holds prefixes and leases, and fails or stalls on command."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvkeep.engine.results import FoundTokens
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.server import LookupServer
from kvkeep.metrics import Metrics

LAYOUT = KVLayout(MemoryFormat.OPAQUE_PAGES, "uint8", 4, (GroupLayout("full", 2, 64),), 0, 0, "toy")


@dataclass
class Numbers:
    """What the target reports."""

    open_leases: int
    used_bytes: int = 10
    free_bytes: int = 20
    capacity_bytes: int = 30
    num_chunks: int = 3
    metrics: dict[str, float] = field(default_factory=lambda: {"kvkeep_a_total": 2.0})


class ToyTarget:
    """Has ``stored`` tokens of every prompt of its salt; leases are names in a set."""

    def __init__(self, stored: int = 0) -> None:
        self.stored = stored
        self.leases: set[str] = set()
        self.seen: list[tuple[list[int], object]] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.clear_gate = threading.Event()
        self.clear_gate.set()
        self.answered = threading.Semaphore(0)
        self.later = False
        self.under_way: dict[str, tuple[int, Future]] = {}
        self.kept: list[tuple[str, int]] = []

    def lookup(self, tokens, *, lookup_id, pin, scope, counted):
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.seen.append((np.asarray(tokens).tolist(), scope))
        found = min(self.stored, len(tokens))
        if isinstance(self.stored, FoundTokens):
            found = self.stored.first(found)
        if pin and found:
            self.leases.add(lookup_id)
        return found

    def async_lookup(self, tokens, *, lookup_id, scope, counted):
        """At once, or, with ``later``, when the test settles it."""
        if self.error is not None:
            raise self.error
        future = Future()
        if not self.later:
            found = self.lookup(tokens, lookup_id=lookup_id, pin=True, scope=scope, counted=counted)
            future.set_result(FoundTokens([("tier", found)] if found else []))
        else:
            self.under_way[lookup_id] = (len(tokens), future)
        return future

    def settle(self, lookup_id):
        """The chunks of a lookup have come."""
        num_tokens, future = self.under_way.pop(lookup_id)
        self.leases.add(lookup_id)
        future.set_result(FoundTokens([("tier", min(self.stored, num_tokens))]))

    def lookup_keep(self, lookup_id, num_tokens):
        self.kept.append((lookup_id, num_tokens))

    def lookup_unpin(self, lookup_id):
        self.leases.discard(lookup_id)
        _, future = self.under_way.pop(lookup_id, (0, None))
        if future is not None:
            future.set_result(FoundTokens())
        self.answered.release()

    def check(self):
        if self.error is not None:
            raise self.error
        return Numbers(len(self.leases))

    def clear(self, locations=None):
        if locations is not None and set(locations) != {"tier"}:
            raise ValueError(f"no tier is called {locations}")
        assert self.clear_gate.wait(30)
        num, self.stored = self.stored, 0
        return num


@dataclass
class Service:
    """Servers of some ranks and a client of them."""

    targets: list[ToyTarget]
    servers: list[LookupServer]
    metrics: list[Metrics]
    client: LookupClient
    paths: list[Path]


def start_server(target: ToyTarget, path: Path, rank: int = 0, world_size: int = 1):
    """A server of one rank and its metrics."""
    metrics = Metrics()
    identity = CacheIdentity("m", "r", LAYOUT, 4, rank, world_size)
    return LookupServer(target, path, identity=identity, metrics=metrics), metrics


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Service]]:
    """``start(stored, stored, ..., timeout_s=)``: one rank per argument."""
    made: list[Service] = []

    def make(*stored: int, timeout_s: float = 10.0, prefetch_timeout_s: float = 10.0) -> Service:
        targets = [ToyTarget(number) for number in stored]
        directory = tmp_path / f"s{len(made)}"
        paths = [directory / f"{rank}.sock" for rank in range(len(stored))]
        both = [
            start_server(target, path, rank, len(stored))
            for rank, (target, path) in enumerate(zip(targets, paths, strict=True))
        ]
        client = LookupClient(paths, timeout_s=timeout_s, prefetch_timeout_s=prefetch_timeout_s)
        made.append(Service(targets, [b[0] for b in both], [b[1] for b in both], client, paths))
        return made[-1]

    yield make
    for service in made:
        for target in service.targets:
            target.gate.set()
            target.clear_gate.set()
        service.client.close()
        for server in service.servers:
            server.close()
            assert not server.path.exists()
