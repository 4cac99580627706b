from __future__ import annotations

import pytest
import torch

from kvkeep.backends.base import BackendHealth
from kvkeep.backends.reference import DictBackend
from support.engine_rig import EngineRig

TOKENS = list(range(1000, 1032))
PAGES = [9, 3, 60, 22, 1, 40, 17, 8]


def retrieve(rig: EngineRig, tokens=TOKENS, slots=None, **more) -> torch.Tensor:
    slots = rig.model.slots(PAGES, len(tokens)) if slots is None else slots
    return rig.engine.retrieve(tokens, kvcaches=rig.model.caches, slot_mapping=slots, **more)


def test_a_longer_prompt_finds_its_prefix() -> None:
    longer = [*TOKENS, *range(40)]
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        pages = range(18)
        slots = rig.model.slots(pages, 72)
        mask = rig.engine.retrieve(longer, kvcaches=rig.model.caches, slot_mapping=slots)
        assert mask.tolist() == [True] * 32 + [False] * 40
        assert rig.model.right_pages(longer, pages) == [True] * 8 + [False] * 10
        assert all(rig.model.wiped_pages(range(8, 64)))


def test_another_first_token_is_a_miss() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        assert not retrieve(rig, [7, *TOKENS[1:]]).any()
        assert all(rig.model.wiped_pages(range(64)))


def test_skipped_slots_are_neither_written_nor_true() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        slots = rig.model.slots(PAGES, 32)
        slots[:12] = -1  # a chunk and half of the next one
        mask = retrieve(rig, slots=slots)
        assert mask.tolist() == [False] * 12 + [True] * 20
        assert rig.model.right_pages(TOKENS, PAGES) == [False] * 3 + [True] * 5
        assert all(rig.model.wiped_pages(PAGES[:3]))


def test_a_chunk_that_is_skipped_whole_need_not_be_stored() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        rig.storage.batched_remove(keys[:1])
        rig.model.wipe(range(64))
        slots = rig.model.slots(PAGES, 32)
        assert not retrieve(rig, slots=slots).any()
        slots[:8] = -1
        assert retrieve(rig, slots=slots).tolist() == [False] * 8 + [True] * 24
        slots[:] = -1
        assert not retrieve(rig, slots=slots).any()


def test_offset_leaves_masked_tokens_without_slots() -> None:
    mask = [False] * 16 + [True] * 16
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        slots = rig.model.slots(PAGES, 32)[16:]
        slots[:4] = -1
        loaded = retrieve(rig, slots=slots, mask=mask, offset=16)
        assert loaded.tolist() == [False] * 20 + [True] * 12
        assert rig.model.right_pages(TOKENS, PAGES) == [False] * 5 + [True] * 3


def test_the_lease_is_used_up_by_the_load() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        assert rig.engine.lookup(TOKENS, lookup_id="r1", pin=True) == 32
        assert rig.engine.check().open_leases == 1
        # cleared: invisible, and still there for the one who was promised it
        assert rig.engine.clear() == 4
        assert rig.engine.lookup(TOKENS) == 0
        rig.model.wipe(range(64))
        assert retrieve(rig, req_id="r1").all()
        assert all(rig.model.right_pages(TOKENS, PAGES))
        assert rig.engine.check().used_bytes == 0
        assert not retrieve(rig, req_id="r1").any()


def test_a_lease_of_a_prefix_is_completed_by_key() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        assert rig.engine.lookup(TOKENS[:16], lookup_id="r1", pin=True) == 16
        rig.model.wipe(range(64))
        assert retrieve(rig, req_id="r1").all()
        assert all(rig.model.right_pages(TOKENS, PAGES))


def test_a_lease_of_other_tokens_gives_nothing() -> None:
    other = list(range(2000, 2032))
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        assert rig.engine.lookup(TOKENS, lookup_id="r1", pin=True) == 32
        rig.model.wipe(range(64))
        assert not retrieve(rig, other, req_id="r1").any()
        assert all(rig.model.wiped_pages(range(64)))
        assert rig.engine.check().open_leases == 0


def test_a_load_with_wrong_arguments_ends_the_lease_too() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        for wrong in (dict(mask=[True]), dict(slots=torch.zeros(32))):
            rig.engine.lookup(TOKENS, lookup_id="r1", pin=True)
            with pytest.raises(ValueError):
                retrieve(rig, req_id="r1", **wrong)
            rig.check_idle()


class Sick(DictBackend):
    """A tier that says how it is."""

    healthy = True

    def health(self) -> BackendHealth:
        return BackendHealth(self.healthy, "as told")


def test_a_sick_tier_is_left_out_and_taken_back() -> None:
    with EngineRig(tiers=[Sick]) as rig:
        rig.fill(TOKENS, PAGES)
        tier = rig.storage.storage_backends["DictBackend"]
        rig.engine.clear(["LocalCPUBackend"])
        tier.healthy = False
        health = rig.engine.health()
        assert health.healthy  # one sick tier does not switch off the engine
        assert not health.backends["DictBackend"].healthy
        assert rig.engine.lookup(TOKENS) == 0
        rig.fill(TOKENS[:8], PAGES)
        assert rig.engine.lookup(TOKENS) == 8
        tier.healthy = True
        assert rig.engine.health().healthy
        assert rig.engine.lookup(TOKENS) == 32
        assert retrieve(rig).all()


def test_an_unhealthy_engine_does_nothing_and_says_so() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        rig.engine.lookup(TOKENS, lookup_id="r1", pin=True)
        healthy = rig.cpu.health
        rig.cpu.health = lambda: BackendHealth(False, "broken")
        assert rig.engine.is_healthy()
        assert not rig.engine.health().healthy
        assert not rig.engine.is_healthy()
        rig.model.wipe(range(64))
        slots = rig.model.slots(PAGES, 32)
        result = rig.engine.store(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots)
        assert result.stopped_by == "unhealthy"
        assert rig.engine.lookup(TOKENS, lookup_id="r2", pin=True) == 0
        assert not retrieve(rig, req_id="r1").any()
        assert all(rig.model.wiped_pages(range(64)))
        values = rig.metrics.snapshot()
        assert values['kvkeep_store_skipped_tokens_total{cause="unhealthy"}'] == 32
        assert values['kvkeep_load_failed_tokens_total{cause="unhealthy"}'] == 32
        name = 'kvkeep_failures_total{tier="engine",operation="lookup",cause="unhealthy"}'
        assert values[name] == 1
        assert values["kvkeep_lookup_tokens_total"] == 64, "a refused lookup is a miss"
        rig.cpu.health = healthy
        assert rig.engine.health().healthy
        assert retrieve(rig).all()
