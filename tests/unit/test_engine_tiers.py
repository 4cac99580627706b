"""The engine over several tiers: one prompt whose chunks lie in memory, below, and in memory."""

from __future__ import annotations

import pytest
import torch

from kvkeep.backends.reference import DictBackend
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend
from support.engine_rig import EngineRig

TOKENS = list(range(1000, 1056))
PAGES = [9, 3, 60, 22, 1, 40, 17, 8, 31, 50, 5, 12, 44, 27]
L1, L2, L3 = "LocalCPUBackend", "L2", "L3"


def below(name: str, *faults: Fault):
    return lambda pool: FaultyBackend(DictBackend(pool, name=name), faults)


def keys_of(rig: EngineRig) -> list:
    return rig.engine.token_database.process_tokens(TOKENS).keys


def leave_in(rig: EngineRig, keys, tier: str) -> None:
    rig.storage.batched_remove(
        keys, [name for name in rig.storage.storage_backends if name != tier]
    )


def spread(rig: EngineRig) -> None:
    """Chunks 0 and 1 in the pool, 2 and 3 in L2, 4 in L3, 5 and 6 in the pool; pages wiped."""
    rig.fill(TOKENS, PAGES)
    keys = keys_of(rig)
    for part, tier in [(keys[:2], L1), (keys[2:4], L2), (keys[4:5], L3), (keys[5:], L1)]:
        leave_in(rig, part, tier)
    rig.model.wipe(range(64))


def bulk(rig: EngineRig, req_id=None) -> torch.Tensor:
    slots = rig.model.slots(PAGES, len(TOKENS))
    return rig.engine.retrieve(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots, req_id=req_id)


def layerwise(rig: EngineRig, req_id=None) -> torch.Tensor:
    """Fault 29: exactly num_layers + 2 steps, whatever there is."""
    slots = rig.model.slots(PAGES, len(TOKENS))
    steps = list(
        rig.engine.retrieve_layer(
            TOKENS, kvcaches=rig.model.caches, slot_mapping=slots, req_id=req_id
        )
    )
    assert len(steps) == 3 + 2
    assert steps[1:-1] == [None] * 3
    assert steps[0] == int(steps[-1].sum())
    return steps[-1]


both_ways = pytest.mark.parametrize("retrieve", [bulk, layerwise])


@both_ways
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_prefix_over_three_tiers_and_back(retrieve, is_pinned) -> None:
    """Every page is right, and everything is in memory afterwards."""
    with EngineRig(tiers=[below(L2), below(L3)]) as rig:
        spread(rig)
        if is_pinned:
            assert rig.engine.lookup(TOKENS, lookup_id="r", pin=True) == 56
        assert retrieve(rig, "r").all()
        assert rig.model.right_pages(TOKENS, PAGES) == [True] * 14
        expected = 4 if is_pinned else 7  # what a lookup promised is a copy of its own
        assert sum(rig.storage.contains(key, [L1]) is not None for key in keys_of(rig)) == expected
        values = rig.metrics.snapshot()
        loaded = {t: values.get(f'kvkeep_loaded_tokens_total{{tier="{t}"}}') for t in (L1, L2, L3)}
        if is_pinned:
            assert loaded[L1] == 56
        else:
            assert loaded == {L1: 32, L2: 16, L3: 8}


@both_ways
def test_a_tier_that_fails_in_the_middle_ends_the_prefix_there(retrieve) -> None:
    """Fault 3: the mask is what was written; what was fetched beyond the gap is given back."""
    with EngineRig(tiers=[below(L2), below(L3, Fault("get", FaultKind.RAISE))]) as rig:
        spread(rig)
        mask = retrieve(rig)
        assert mask.tolist() == [True] * 32 + [False] * 24
        assert rig.model.right_pages(TOKENS, PAGES) == [True] * 8 + [False] * 6
        assert all(rig.model.wiped_pages(PAGES[8:]))
        lost = 'kvkeep_load_failed_tokens_total{cause="missing"}'
        assert rig.metrics.snapshot()[lost] == 24


@both_ways
def test_loading_from_below_does_not_evict_the_same_prefix(retrieve) -> None:
    """A pool as large as the prompt: what is in it is held before room is made for the rest."""
    with EngineRig(pool_chunks=7, tiers=[below(L2), below(L3)]) as rig:
        spread(rig)
        keys = keys_of(rig)
        other = list(range(5000, 5024))
        rig.fill(other, range(6))
        rig.storage.touch_cache(rig.engine.token_database.process_tokens(other).keys)
        rig.model.wipe(range(64))
        assert [rig.storage.contains(key) for key in keys[5:]] == [L1, L1]
        assert retrieve(rig).all()
        assert rig.model.right_pages(TOKENS, PAGES) == [True] * 14


@both_ways
def test_a_pool_smaller_than_the_prompt_loads_what_fits(retrieve) -> None:
    """The mask is an unbroken prefix of exactly what was written."""
    with EngineRig(pool_chunks=4, tiers=[below(L2)]) as rig:
        rig.fill(TOKENS, PAGES)
        rig.engine.clear([L1])
        for _ in range(2):  # the rest of the store came in once there was room
            rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        mask = retrieve(rig)
        num_pages = int(mask.sum()) // 4
        assert mask.tolist() == [True] * (num_pages * 4) + [False] * (56 - num_pages * 4)
        assert rig.model.right_pages(TOKENS, PAGES) == [True] * num_pages + [False] * (
            14 - num_pages
        )
        assert all(rig.model.wiped_pages(PAGES[num_pages:]))


@both_ways
def test_frozen_no_other_tier_is_asked(retrieve) -> None:
    """Spec 1.10: lookup, load and store of a frozen engine call no tier below."""
    with EngineRig(tiers=[below(L2), below(L3)]) as rig:
        spread(rig)
        rig.engine.freeze(True)
        tiers = [rig.storage.storage_backends[name] for name in (L2, L3)]
        before = [dict(tier.calls) for tier in tiers]
        assert rig.engine.lookup(TOKENS) == 16
        assert rig.engine.lookup(TOKENS, search_range=[L2]) == 0
        assert rig.engine.lookup(TOKENS, lookup_id="r", pin=True) == 16
        assert retrieve(rig, "r").tolist() == [True] * 16 + [False] * 40
        assert retrieve(rig).tolist() == [True] * 16 + [False] * 40
        rig.fill([*TOKENS, *range(8)], [*PAGES, 61, 62])
        assert [dict(tier.calls) for tier in tiers] == before
        rig.engine.freeze(False)
        assert rig.engine.lookup(TOKENS) == 56


@both_ways
def test_a_bypassed_tier_is_a_gap_until_it_is_back(retrieve) -> None:
    with EngineRig(tiers=[below(L2), below(L3, Fault("health", FaultKind.DROP, 0, 1))]) as rig:
        spread(rig)
        rig.engine.health()
        assert rig.storage.bypassed == {L3}
        assert int(retrieve(rig).sum()) == 32
        rig.engine.health()
        assert retrieve(rig).all()
        assert rig.model.right_pages(TOKENS, PAGES) == [True] * 14


def test_a_layerwise_load_over_several_tiers_that_is_dropped_gives_everything_back() -> None:
    """Fault 19: the rig checks at its end that nothing is held."""
    for steps in range(5):
        with EngineRig(tiers=[below(L2), below(L3)]) as rig:
            spread(rig)
            slots = rig.model.slots(PAGES, len(TOKENS))
            load = rig.engine.retrieve_layer(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots)
            for _ in range(steps):
                next(load)
            load.close()
