"""A tier that dies, through a whole CacheManager: it is left out, and it comes back by itself."""

from __future__ import annotations

import pytest

from kvkeep.backends.base import BackendHealth
from kvkeep.backends.reference import DictBackend
from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.errors import BackendError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.hashing import split_layers
from kvkeep.identity import CacheIdentity
from kvkeep.testing.chunks import wait_until
from kvkeep.testing.faulty import FaultyBackend
from support.paged_engine import PagedEngine

TOKENS = list(range(1000, 1032))
PAGES = range(8)
L1, L2 = "LocalCPUBackend", "DictBackend"
GAUGE = f'kvkeep_backend_bypassed{{tier="{L2}"}}'


class Mortal(FaultyBackend):
    """Dead: every call but ``health`` raises, and ``health`` says no, raises, or never answers."""

    def __init__(self, allocator_backend, dies_by: str) -> None:
        super().__init__(DictBackend(allocator_backend))
        self.dies_by = dies_by
        self.is_dead = False
        self.asked = 0

    def _enter(self, operation):
        if operation == "health":
            return super()._enter(operation)
        if self.is_dead:
            self.asked += 1
            raise BackendError("dead", backend=self.name, operation=operation)
        return super()._enter(operation)

    def touch_cache(self, keys):
        self._enter("touch")
        super().touch_cache(keys)

    def health(self):
        if self.is_dead and self.dies_by == "raise":
            raise BackendError("dead", backend=self.name, operation="health")
        if self.is_dead and self.dies_by == "hang":
            self.is_hanging = True
            try:
                wait_until(lambda: not self.is_dead)
            finally:
                self.is_hanging = False
        if self.is_dead:
            return BackendHealth(False, "dead")
        return super().health()


class Life:
    """A manager with a mortal tier, asked every few milliseconds."""

    def __init__(self, dies_by: str) -> None:
        self.model = PagedEngine(num_pages=16)
        settings = load_settings(
            extra={
                "chunk_size": 8,
                "cpu.size": "64KiB",
                "cpu.prefault": "0B",
                "health": {"interval": "5ms", "timeout": "50ms"},
            }
        )
        self.manager = CacheManager.create(
            settings,
            CacheIdentity("m", "1", self.model.layout, chunk_size=8),
            PagedGPUConnector(self.model.layout),
            extra_backends=[lambda first: Mortal(first, dies_by)],
        )
        self.engine, self.storage = self.manager.engine, self.manager.storage
        self.tier = self.storage.storage_backends[L2]
        self.slots = self.model.slots(PAGES, 32)

    def store(self, tokens=TOKENS):
        self.model.prefill(tokens, PAGES)
        return self.engine.store(tokens, kvcaches=self.model.caches, slot_mapping=self.slots)

    def retrieve(self) -> bool:
        self.model.wipe(range(16))
        mask = self.engine.retrieve(TOKENS, kvcaches=self.model.caches, slot_mapping=self.slots)
        assert self.model.right_pages(TOKENS, PAGES) == mask[::4].tolist()
        return bool(mask.all())

    def bypassed(self) -> bool:
        assert self.engine.is_healthy(), "one tier switched the engine off"
        return self.manager.metrics.snapshot()[GAUGE] == 1

    def check_idle(self) -> None:
        report = self.engine.check()
        assert (report.open_leases, report.num_objects) == (0, report.num_chunks)
        assert report.used_bytes + report.free_bytes == report.capacity_bytes


@pytest.mark.parametrize("dies_by", ["unhealthy", "raise", "hang"])
def test_a_tier_that_dies_is_left_out_everywhere_until_it_is_back(dies_by) -> None:
    """Fault 33: put, get, contains, layerwise get, remove, clear and touch; L1 goes on."""
    life = Life(dies_by)
    with life.manager:
        keys = life.engine.token_database.process_tokens(TOKENS).keys
        life.store()
        assert not life.bypassed()
        life.tier.is_dead = True
        wait_until(life.bypassed)
        asked = life.tier.asked
        assert life.engine.lookup(TOKENS, lookup_id="r", pin=True) == 32
        life.engine.lookup_unpin("r")
        assert life.retrieve()
        assert life.store([7] * 32).num_tokens == 32
        layers = list(zip(*[split_layers(key, 3) for key in keys], strict=True))
        for location in (L2, life.storage.get_block_mapping(keys)):
            future = next(life.storage.layerwise_batched_get(layers, location))
            for obj in future.result(20):
                if obj is not None:
                    obj.ref_count_down()
        assert life.storage.batched_get(keys, L2) == [None] * 4
        life.storage.touch_cache(keys)
        assert life.storage.batched_remove(keys[3:]) == 1
        assert life.engine.lookup(TOKENS) == 24
        life.engine.clear([L1])
        assert life.engine.lookup(TOKENS) == 0
        assert life.tier.asked == asked, "a tier that is left out was called"
        life.tier.is_dead = False
        wait_until(lambda: not life.bypassed())
        assert life.engine.lookup(TOKENS) == 32  # it kept what it had
        assert life.retrieve()
        life.check_idle()


def test_a_lease_on_chunks_of_a_tier_that_dies_meanwhile_is_kept() -> None:
    """Fault 17: what was promised is loaded; its pins are given back without asking the tier."""
    life = Life("unhealthy")
    with life.manager:
        life.store()
        life.engine.clear([L1])
        assert life.engine.lookup(TOKENS, lookup_id="r", pin=True) == 32
        assert life.engine.lookup(TOKENS, lookup_id="dropped", pin=True) == 32
        life.tier.is_dead = True
        wait_until(life.bypassed)
        asked = life.tier.asked
        life.model.wipe(range(16))
        mask = life.engine.retrieve(
            TOKENS, kvcaches=life.model.caches, slot_mapping=life.slots, req_id="r"
        )
        assert mask.all()
        assert life.model.right_pages(TOKENS, PAGES) == [True] * 8
        life.engine.lookup_unpin("dropped")
        assert life.tier.asked == asked, "a tier that is left out was called"
        life.check_idle()
        life.tier.is_dead = False


def test_closing_with_a_check_that_hangs_is_quick() -> None:
    life = Life("hang")
    life.tier.is_dead = True
    wait_until(life.bypassed)
    life.manager.close()
    assert life.tier.is_hanging, "closing has waited for the check"
    life.tier.is_dead = False  # lets the thread of the check go
