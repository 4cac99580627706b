from __future__ import annotations

import pytest

from kvkeep.backends.reference import DictBackend
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend
from support.engine_rig import EngineRig

TOKENS = list(range(1000, 1032))


def test_a_pin_needs_a_name() -> None:
    with EngineRig() as rig, pytest.raises(ValueError, match="lookup_id"):
        rig.engine.lookup(TOKENS, pin=True)


def test_an_id_without_pin_holds_nothing() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS)
        assert rig.engine.lookup(TOKENS, lookup_id="a") == 32
        rig.check_idle()


def test_unpin_ends_the_lease_once() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS)
        rig.engine.lookup(TOKENS, lookup_id="a", pin=True)
        assert rig.engine.lookup_unpin("a") is True
        assert rig.engine.lookup_unpin("a") is False
        rig.check_idle()


def test_a_miss_holds_no_lease_and_ends_the_earlier_one() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS)
        rig.engine.lookup(TOKENS, lookup_id="a", pin=True)
        assert rig.engine.lookup([5] * 32, lookup_id="a", pin=True) == 0
        rig.check_idle()


def test_an_unknown_tier_is_an_error_and_pins_nothing() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS)
        with pytest.raises(ValueError, match="no tier is called 'disk'"):
            rig.engine.lookup(TOKENS, lookup_id="a", pin=True, search_range=["disk"])
        rig.check_idle()


def test_hits_are_counted_by_tier() -> None:
    with EngineRig(tiers=[DictBackend]) as rig:
        rig.fill(TOKENS)
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        rig.storage.batched_remove(keys[1:2], ["LocalCPUBackend"])
        assert rig.engine.lookup([*TOKENS, 1, 2, 3]) == 32
        values = rig.metrics.snapshot()
        assert values["kvkeep_lookup_tokens_total"] == 35
        assert values['kvkeep_lookup_hit_tokens_total{tier="LocalCPUBackend"}'] == 8
        assert values['kvkeep_lookup_hit_tokens_total{tier="DictBackend"}'] == 24  # one run


def test_a_tier_that_pins_and_then_fails_keeps_no_pin() -> None:
    """Fault 17: its chunks belong to no answer, so nobody would ever unpin them."""
    fault = Fault("contains", FaultKind.RAISE_AFTER)
    with EngineRig(tiers=[lambda first: FaultyBackend(DictBackend(first), [fault])]) as rig:
        rig.fill(TOKENS)
        rig.storage.clear(["LocalCPUBackend"])
        assert rig.engine.lookup(TOKENS, lookup_id="a", pin=True) == 0
        rig.check_idle()


def test_what_is_cleared_by_tags_in_one_tier_can_be_cleared_in_the_others() -> None:
    tags = {"kvkeep.tag.tenant": "a"}
    with EngineRig(tiers=[DictBackend]) as rig:
        slots = rig.model.slots(range(8), 32)
        rig.engine.store(
            TOKENS, kvcaches=rig.model.caches, slot_mapping=slots, request_configs=tags
        )
        assert rig.engine.clear(["DictBackend"], tags) == 4
        assert rig.engine.lookup(TOKENS, request_configs=tags) == 32
        assert rig.engine.clear(None, tags) == 4
        assert rig.engine.lookup(TOKENS, request_configs=tags) == 0


def test_clear_by_tags_removes_only_theirs() -> None:
    mine = {"kvkeep.tag.team": "mine"}
    theirs = {"kvkeep.tag.team": "theirs"}
    with EngineRig(pool_chunks=32) as rig:
        slots = rig.model.slots(range(8), 32)
        rig.fill(TOKENS)
        for configs in (mine, theirs):
            rig.engine.store(
                TOKENS, kvcaches=rig.model.caches, slot_mapping=slots, request_configs=configs
            )
        assert rig.engine.clear(request_configs=mine) == 4
        assert rig.engine.lookup(TOKENS, request_configs=mine) == 0
        assert rig.engine.lookup(TOKENS, request_configs=theirs) == 32
        assert rig.engine.lookup(TOKENS) == 32
        assert rig.engine.clear(request_configs=mine) == 0
        assert rig.engine.clear(request_configs={"unrelated": "x"}) == 8
        assert rig.engine.check().num_chunks == 0


def test_check_tells_what_is_held() -> None:
    with EngineRig() as rig:
        before = rig.engine.check()
        assert (before.used_bytes, before.num_chunks, before.num_objects) == (0, 0, 0)
        rig.fill(TOKENS)
        report = rig.engine.check()
        assert report.num_chunks == report.num_objects == 4
        assert report.used_bytes + report.free_bytes == report.capacity_bytes
        assert report.used_bytes >= 4 * 2 * 3 * 64
        assert report.metrics["kvkeep_stored_tokens_total"] == 32
