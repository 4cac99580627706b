from __future__ import annotations

import numpy as np
import pytest
import torch

from kvkeep.backends.reference import DictBackend
from kvkeep.engine.engine import StoreResult, StoreStop
from kvkeep.errors import LayoutError, MaskError, TokenError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.testing.faulty import FaultyBackend
from kvkeep.tokens import make_scope
from support.engine_rig import EngineRig
from support.paged_engine import PagedEngine

TOKENS = list(range(1000, 1032))  # four chunks of 8 tokens, eight pages of 4
PAGES = [9, 3, 60, 22, 1, 40, 17, 8]


def store(rig: EngineRig, tokens=TOKENS, mask=None, pages=PAGES, **more) -> StoreResult:
    slots = rig.model.slots(pages, len(tokens))
    return rig.engine.store(tokens, mask, kvcaches=rig.model.caches, slot_mapping=slots, **more)


def retrieve(rig: EngineRig, tokens=TOKENS, mask=None, pages=PAGES, **more) -> torch.Tensor:
    slots = rig.model.slots(pages, len(tokens))
    return rig.engine.retrieve(tokens, mask, kvcaches=rig.model.caches, slot_mapping=slots, **more)


def test_what_was_stored_comes_back_into_other_pages() -> None:
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        assert store(rig) == StoreResult(32, 32, None)
        rig.model.wipe(range(64))
        target = [5, 6, 7, 0, 63, 62, 61, 30]
        mask = retrieve(rig, pages=target)
        assert mask.dtype == torch.bool
        assert mask.device.type == "cpu"
        assert mask.all() and len(mask) == 32
        assert all(rig.model.right_pages(TOKENS, target))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_tokens_of_any_kind_name_the_same_chunks(kind) -> None:
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        store(rig, kind(TOKENS))
        assert rig.engine.lookup(TOKENS) == 32


def test_stored_chunks_are_not_copied_again() -> None:
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        store(rig, TOKENS[:16])
        rig.model.wipe(PAGES[:4])  # whoever copied them again would keep these bytes
        assert store(rig) == StoreResult(32, 16, None)
        assert store(rig) == StoreResult(32, 0, None)
        rig.model.wipe(range(64))
        retrieve(rig)
        assert all(rig.model.right_pages(TOKENS, PAGES))
        assert rig.metrics.snapshot()["kvkeep_stored_tokens_total"] == 32


def test_a_gap_in_the_middle_is_filled() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        rig.storage.batched_remove([keys[1], keys[2]])
        assert rig.engine.lookup(TOKENS) == 8
        assert store(rig) == StoreResult(32, 16, None)
        rig.model.wipe(range(64))
        assert retrieve(rig).all()
        assert all(rig.model.right_pages(TOKENS, PAGES))


def test_a_store_asks_no_lower_tier() -> None:
    """It runs in the engine's thread; what a tier knows without asking is not copied again."""
    asked: list[FaultyBackend] = []

    def make(first):
        asked.append(FaultyBackend(DictBackend(first)))
        return asked[0]

    with EngineRig(tiers=[make]) as rig:
        rig.model.prefill(TOKENS, PAGES)
        assert store(rig) == StoreResult(32, 32, None)
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        rig.storage.batched_remove(keys[:1])
        assert store(rig) == StoreResult(32, 8, None)
        rig.storage.clear(["LocalCPUBackend"])
        assert store(rig) == StoreResult(32, 0, None), "the lower tier is known to have all"
        assert asked[0].calls["contains"] == 0


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 31])
@pytest.mark.parametrize("save_unfull", [False, True])
def test_lengths_around_chunk_borders(length: int, save_unfull: bool) -> None:
    tokens = TOKENS[:length]
    with EngineRig(save_unfull_chunk=save_unfull) as rig:
        rig.model.prefill(tokens, PAGES)
        result = store(rig, tokens)
        stored = length if save_unfull else length // 8 * 8
        stop = None if stored == length else StoreStop.TAIL
        assert result == StoreResult(stored, stored, stop)
        assert rig.engine.lookup(tokens) == stored
        rig.model.wipe(range(64))
        mask = retrieve(rig, tokens)
        assert mask.tolist() == [True] * stored + [False] * (length - stored)
        right = rig.model.right_pages(tokens, PAGES)
        assert right == [page * 4 < stored for page in range(len(right))]


def test_masked_tokens_are_hashed_and_not_stored() -> None:
    mask = torch.tensor([False] * 16 + [True] * 16)
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        slots = rig.model.slots(PAGES, 32)[16:]
        result = rig.engine.store(
            TOKENS, mask, kvcaches=rig.model.caches, slot_mapping=slots, offset=16
        )
        assert result == StoreResult(32, 16, None)
        assert rig.engine.lookup(TOKENS) == 0  # the prefix is not there
        rig.model.wipe(range(64))
        loaded = retrieve(rig, mask=mask)
        assert loaded.tolist() == mask.tolist()
        assert rig.model.right_pages(TOKENS, PAGES) == [False] * 4 + [True] * 4


def test_all_tokens_masked_is_nothing_to_do() -> None:
    with EngineRig() as rig:
        assert store(rig, mask=[False] * 32) == StoreResult(32, 0, None)
        assert rig.engine.lookup(TOKENS) == 0


def test_no_tokens() -> None:
    with EngineRig() as rig:
        assert store(rig, []) == StoreResult(0, 0, StoreStop.EMPTY)
        assert retrieve(rig, []).shape == (0,)
        assert rig.engine.lookup([]) == 0


def test_no_room_keeps_the_prefix_that_fits() -> None:
    with EngineRig(pool_chunks=3) as rig:
        rig.model.prefill(TOKENS, PAGES)
        assert store(rig) == StoreResult(24, 24, StoreStop.NO_ROOM)
        assert rig.engine.lookup(TOKENS) == 24
        # what is there of the same prompt is not evicted for the rest of it
        assert store(rig) == StoreResult(24, 0, StoreStop.NO_ROOM)
        assert rig.engine.lookup(TOKENS) == 24
        skipped = rig.metrics.snapshot()['kvkeep_store_skipped_tokens_total{cause="no_room"}']
        assert skipped == 16


def test_a_pool_smaller_than_a_chunk() -> None:
    with EngineRig(pool_chunks=0) as rig:
        rig.model.prefill(TOKENS, PAGES)
        assert store(rig) == StoreResult(0, 0, StoreStop.NO_ROOM)
        assert rig.engine.lookup(TOKENS) == 0
        assert not retrieve(rig).any()


def test_other_prompts_are_evicted_for_a_new_one() -> None:
    other = list(range(2000, 2024))
    with EngineRig(pool_chunks=4) as rig:
        rig.fill(other)
        rig.model.prefill(TOKENS, PAGES)
        assert store(rig) == StoreResult(32, 32, None)
        assert rig.engine.lookup(other) == 0


def test_what_is_leased_is_not_evicted() -> None:
    other = list(range(2000, 2024))
    with EngineRig(pool_chunks=4) as rig:
        rig.fill(other)
        assert rig.engine.lookup(other, lookup_id="reader", pin=True) == 24
        rig.model.prefill(TOKENS, PAGES)
        assert store(rig) == StoreResult(8, 8, StoreStop.NO_ROOM)
        rig.model.wipe(range(64))
        assert retrieve(rig, other, req_id="reader").all()
        assert all(rig.model.right_pages(other, PAGES))
        rig.model.prefill(TOKENS, PAGES)
        assert store(rig) == StoreResult(32, 24, None)


def test_frozen_stores_nothing_and_reads_only_the_cpu_tier() -> None:
    other = list(range(2000, 2016))
    with EngineRig(tiers=[DictBackend]) as rig:
        rig.fill(TOKENS, PAGES)
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        rig.storage.batched_remove(keys[2:], ["LocalCPUBackend"])
        rig.engine.freeze(True)
        assert rig.engine.is_frozen()
        assert store(rig, other, pages=range(4)) == StoreResult(0, 0, StoreStop.FROZEN)
        assert rig.engine.lookup(TOKENS) == 16
        assert retrieve(rig).tolist() == [True] * 16 + [False] * 16
        rig.engine.freeze(False)
        assert rig.engine.lookup(TOKENS) == 32
        assert rig.engine.lookup(other) == 0
        skipped = rig.metrics.snapshot()['kvkeep_store_skipped_tokens_total{cause="frozen"}']
        assert skipped == 16


def test_both_tiers_keep_the_chunk_and_either_gives_it() -> None:
    with EngineRig(tiers=[DictBackend]) as rig:
        rig.fill(TOKENS, PAGES)
        assert rig.engine.clear(["LocalCPUBackend"]) == 4
        assert rig.engine.lookup(TOKENS, search_range=["LocalCPUBackend"]) == 0
        assert rig.engine.lookup(TOKENS) == 32
        rig.model.wipe(range(64))
        assert retrieve(rig).all()
        assert all(rig.model.right_pages(TOKENS, PAGES))
        values = rig.metrics.snapshot()
        assert values['kvkeep_loaded_tokens_total{tier="DictBackend"}'] == 32
        assert rig.engine.lookup(TOKENS, search_range=["LocalCPUBackend"]) == 32  # written back


def test_tags_and_salts_share_nothing() -> None:
    tag = {"kvkeep.tag.team": "a", "unrelated": 1}
    scopes = [
        dict(),
        dict(request_configs=tag),
        dict(request_configs={"kvkeep.tag.team": "b"}),
        dict(scope=make_scope(salt="tenant")),
        dict(scope=make_scope(salt="tenant"), request_configs=tag),
    ]
    with EngineRig(pool_chunks=32) as rig:
        rig.model.prefill(TOKENS, PAGES)
        for number, scope in enumerate(scopes):
            for later in scopes[number:]:
                assert rig.engine.lookup(TOKENS, **later) == 0
            assert store(rig, **scope).num_copied_tokens == 32
            assert rig.engine.lookup(TOKENS, **scope) == 32
        same = dict(scope=make_scope(request_configs=tag))  # the same tag, given another way
        assert rig.engine.lookup(TOKENS, **same) == 32


def test_wrong_arguments_are_named_and_leave_nothing() -> None:
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        with pytest.raises(TokenError):
            store(rig, [1, -2] * 8)
        for mask in ([True] * 8 + [False] * 24, [False] * 4 + [True] * 28, [True] * 31):
            with pytest.raises(MaskError):
                store(rig, mask=mask)
            with pytest.raises(MaskError):
                retrieve(rig, mask=mask)
        slots = rig.model.slots(PAGES, 32)
        slots[21] = -1
        caches = rig.model.caches
        with pytest.raises(ValueError, match="token 21"):
            rig.engine.store(TOKENS, kvcaches=caches, slot_mapping=slots)
        with pytest.raises(ValueError, match="token 20 has no slot"):
            rig.engine.store(TOKENS, kvcaches=caches, slot_mapping=slots[:20])
        with pytest.raises(ValueError, match="one-dimensional"):
            rig.engine.retrieve(TOKENS, kvcaches=caches, slot_mapping=slots.float())
        with pytest.raises(ValueError, match="none are registered"):
            rig.engine.store(TOKENS, kvcaches=None, slot_mapping=slots[:20])
        assert rig.engine.lookup(TOKENS) == 0
        rig.fill(TOKENS, PAGES)
        with pytest.raises(ValueError, match="token 20"):
            rig.engine.retrieve(TOKENS, kvcaches=caches, slot_mapping=slots[:20])
        assert rig.engine.check().num_objects == 4


def test_a_chunk_of_half_pages_or_another_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match="no whole number of pages"):
        EngineRig(chunk_size=6)
    other = PagedEngine(num_pages=4, page_bytes=128).layout
    with pytest.raises(LayoutError, match="layer_page_bytes=128"):
        EngineRig(connector=lambda layout: PagedGPUConnector(other))


def test_closing_ends_everything_and_later_calls_do_nothing() -> None:
    rig = EngineRig()
    rig.fill(TOKENS, PAGES)
    assert rig.engine.lookup(TOKENS, lookup_id="a", pin=True) == 32
    rig.engine.close()
    rig.engine.close()
    assert not rig.engine.is_healthy()
    assert store(rig) == StoreResult(0, 0, StoreStop.UNHEALTHY)
    assert not retrieve(rig, req_id="a").any()
    assert rig.engine.lookup(TOKENS, lookup_id="b", pin=True) == 0
    assert len(rig.storage.leases) == 0
