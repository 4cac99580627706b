"""CacheEngine.async_lookup: answered when the chunks are in memory, and held until used."""

from __future__ import annotations

import pytest

from kvkeep.testing.chunks import wait_until
from kvkeep.testing.faulty import SlowBackend
from support.engine_rig import EngineRig

TOKENS = list(range(100, 148))  # six chunks
CPU, SLOW = "LocalCPUBackend", "SlowBackend"
WAIT_S = 20


@pytest.fixture
def rig():
    """Six chunks that only the slow tier has."""
    with EngineRig(tiers=[SlowBackend]) as rig:
        rig.fill(TOKENS)
        rig.cpu.clear()
        yield rig
        slow_of(rig).gate.set()
        wait_until(lambda: rig.storage.prefetcher.num_lookups == 0)
        wait_until(lambda: rig.engine.check().num_objects == rig.engine.check().num_chunks)
        assert len(rig.storage.prefetcher.events) == 0
        wait_until(lambda: rig.storage.prefetcher.num_chunks_held == 0)


def slow_of(rig) -> SlowBackend:
    return rig.storage.storage_backends[SLOW]


def retrieve(rig, lookup_id: str | None) -> int:
    """Load into fresh pages and compare every byte; how many tokens there are."""
    model = rig.model
    pages = range(20, 20 + model.num_pages_for(len(TOKENS)))
    mask = rig.engine.retrieve(
        TOKENS,
        kvcaches=model.caches,
        slot_mapping=model.slots(pages, len(TOKENS)),
        req_id=lookup_id,
    )
    found = int(mask.sum())
    assert all(model.right_pages(TOKENS[:found], pages))
    return found


def test_answered_once_it_is_in_memory(rig):
    slow_of(rig).gate.clear()
    future = rig.engine.async_lookup(TOKENS, lookup_id="r")
    wait_until(lambda: bool(slow_of(rig).reads))
    assert not future.done()
    slow_of(rig).gate.set()
    found = future.result(WAIT_S)
    assert (found, found.tiers) == (48, ((SLOW, 48),))
    num_reads = len(slow_of(rig).reads)
    slow_of(rig).gate.clear()
    assert retrieve(rig, "r") == 48
    assert len(slow_of(rig).reads) == num_reads, "the load found everything in memory"


def test_answered_at_once_where_everything_is_in_memory(rig):
    assert rig.engine.async_lookup(TOKENS, lookup_id="r").result(WAIT_S) == 48
    slow_of(rig).gate.clear()
    again = rig.engine.async_lookup(TOKENS, lookup_id="s")
    assert again.done()
    assert again.result().tiers == ((CPU, 48),)
    assert retrieve(rig, "s") == 48
    assert rig.engine.lookup_unpin("r")
    assert not rig.engine.lookup_unpin("s")


def test_it_is_part_of_the_hit_rate_once(rig):
    rig.engine.async_lookup(TOKENS, lookup_id="r").result(WAIT_S)
    rig.engine.async_lookup(TOKENS, lookup_id="r", counted=False).result(WAIT_S)
    rig.engine.lookup_unpin("r")
    assert rig.metrics.hit_rate() == 1.0
    snapshot = rig.metrics.snapshot()
    assert snapshot["kvkeep_lookup_tokens_total"] == 48
    assert snapshot[f'kvkeep_lookup_hit_tokens_total{{tier="{SLOW}"}}'] == 48


def test_fault_17_given_up_before_the_load(rig):
    """Fault 17: the request ends while its chunks travel, or when they are there."""
    slow_of(rig).gate.clear()
    future = rig.engine.async_lookup(TOKENS, lookup_id="r")
    wait_until(lambda: bool(slow_of(rig).reads))
    assert rig.engine.lookup_unpin("r")
    assert future.result(WAIT_S) == 0
    slow_of(rig).gate.set()
    assert rig.engine.async_lookup(TOKENS, lookup_id="s").result(WAIT_S) == 48
    assert rig.engine.lookup_unpin("s")


def test_a_shorter_load_gives_the_rest_back(rig):
    """Spec 10.3: what was prefetched and is not used in the end is released at once."""
    assert rig.engine.async_lookup(TOKENS, lookup_id="r").result(WAIT_S) == 48
    rig.engine.lookup_keep("r", 17)
    assert sorted(obj.pin_count for obj in rig.cpu.hot_cache.values()) == [0, 0, 0, 1, 1, 1]
    assert rig.engine.lookup_unpin("r")


def test_a_load_during_the_lookup_waits_for_it(rig):
    slow_of(rig).seconds_per_chunk = 0.02
    rig.engine.async_lookup(TOKENS, lookup_id="r")
    assert retrieve(rig, "r") == 48


def test_an_engine_that_cannot_load_answers_at_once(rig):
    rig.engine._is_healthy = False
    assert rig.engine.async_lookup(TOKENS, lookup_id="r").result(0) == 0
    rig.engine._is_healthy = True
    rig.engine.freeze(True)
    assert rig.engine.async_lookup(TOKENS, lookup_id="r").result(0) == 0
    rig.engine.freeze(False)
    with pytest.raises(ValueError, match="no tier"):
        rig.engine.async_lookup(TOKENS, lookup_id="r", search_range=["tape"])
