"""Requests to an engine over memory and a remote store, for tests in which the store fails.

Callable from the test's thread.
"""

from __future__ import annotations

import gc
import time

from kvkeep.backends.remote.backend import RemoteBackend
from kvkeep.backends.remote.stores import Pending
from kvkeep.backends.remote.values import ChunkLoad
from kvkeep.metrics import Metrics
from kvkeep.storage.health import HealthMonitor
from kvkeep.testing.chunks import wait_until
from support.engine_rig import EngineRig
from support.remote import rig_remote

#: No request takes longer, whatever happens: the deadlines below and a busy machine.
REQUEST_S = 30.0
#: Deadlines that a test can wait for.
SHORT = {
    "load_timeout_s": 1.0,
    "store_timeout_s": 1.0,
    "lookup_timeout_s": 1.0,
    "probe_timeout_s": 1.0,
    "close_timeout_s": 5.0,
}
PAGES = list(range(14))
#: Tokens of a request; all of them are found where the store and the memory tier work.
TOKENS = 56
L1, L3 = "LocalCPUBackend", "RemoteBackend"


class Requests:
    """An engine over memory and a remote store, and requests to it whose bytes are checked."""

    def __init__(self, url: str, metrics: Metrics, **options: float) -> None:
        """Over the store of a URL; ``options`` are fields of RemoteOptions, and ``pool_chunks``."""
        chosen: dict[str, float] = {**SHORT, **options}
        pool_chunks = int(chosen.pop("pool_chunks", 24))
        tier = rig_remote(url, metrics=metrics, chunk_size=8, **chosen)
        self.rig = EngineRig(pool_chunks=pool_chunks, tiers=[tier])
        self.monitor = HealthMonitor(self.rig.storage)
        self.metrics = metrics
        remote = self.rig.storage.storage_backends[L3]
        assert isinstance(remote, RemoteBackend)
        self.remote = remote
        self.slowest_s = 0.0

    def serve(self, number: int) -> int:
        """One request: look up, load, check every byte, compute the rest, store. Tokens found."""
        rig, tokens = self.rig, [1000 * number + position for position in range(TOKENS)]
        started = time.monotonic()
        rig.model.wipe(range(64))
        found = rig.engine.lookup(tokens, lookup_id=f"r{number}", pin=True)
        slots = rig.model.slots(PAGES, len(tokens))
        mask = rig.engine.retrieve(
            tokens, kvcaches=rig.model.caches, slot_mapping=slots, req_id=f"r{number}"
        )
        loaded = int(mask.sum())
        assert mask[:loaded].all()
        assert loaded >= found
        assert rig.model.right_pages(tokens, PAGES)[: loaded // 4] == [True] * (loaded // 4)
        rig.fill(tokens, PAGES)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        return loaded

    def forget(self) -> None:
        """Empty the memory tier."""
        self.rig.storage.clear([L1])

    def settle(self) -> None:
        """Wait until nothing is queued for the store."""
        assert self.remote.flush(REQUEST_S)

    def recovers(self) -> None:
        """Ask the tier's health until it takes part again."""
        wait_until(lambda: self.monitor.check_once()[L3].healthy, timeout_s=60)
        assert L3 not in self.rig.storage.bypassed

    def breaker(self) -> float:
        """Open or not, by the metrics."""
        name = f'kvkeep_breaker_open{{tier="{L3}",direction="load"}}'
        return self.metrics.snapshot()[name]

    def close(self) -> None:
        """Nothing is held by anything."""
        assert self.slowest_s < REQUEST_S
        self.settle()
        self.rig.__exit__(None, None, None)
        gc.collect()
        left = [found for found in gc.get_objects() if type(found) in (ChunkLoad, Pending)]
        assert left == []


def count(metrics: Metrics, name: str, **labels: str) -> float:
    """A counter over all series that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    values = metrics.snapshot().items()
    return sum(
        value
        for series, value in values
        if series.startswith(f"kvkeep_{name}_total") and all(label in series for label in wanted)
    )
