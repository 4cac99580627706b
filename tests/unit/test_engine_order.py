"""What is evicted of a prompt: its end, whatever the policy and however it was stored or loaded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvkeep.backends.base import Lease
from kvkeep.backends.disk.index import DiskIndex
from kvkeep.backends.reference import DictBackend
from kvkeep.codec.frame import ChunkMeta
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.policy.classic import LRUPolicy
from kvkeep.policy.names import POLICIES, create_policy
from kvkeep.policy.reuse import ReusePolicy
from kvkeep.testing.chunks import DTYPE, SHAPE, make_keys, make_pool, put
from kvkeep.testing.policies import PolicyRun
from kvkeep.testing.policies import make_key as policy_key
from support.disk import make_disk
from support.engine_rig import EngineRig

CHUNKS = 4
TOKENS = list(range(500, 500 + CHUNKS * 8))
PAGES = [9, 3, 60, 22, 1, 40, 17, 8]


def store_in_steps(rig: EngineRig) -> None:
    """As chunked prefill does: what was computed so far, without what was stored before."""
    rig.model.prefill(TOKENS, PAGES)
    for end in range(8, len(TOKENS) + 1, 8):
        mask = [False] * (end - 8) + [True] * 8
        slots = rig.model.slots(PAGES, end)
        rig.engine.store(TOKENS[:end], mask, kvcaches=rig.model.caches, slot_mapping=slots)


def check_the_end_goes_first(rig: EngineRig, num_chunks: int = CHUNKS) -> None:
    """Take memory chunk by chunk: what is left is always the start of the prompt."""
    shape, dtype, fmt = rig.connector.chunk_shape(8)
    held = []
    for left in range(num_chunks - 1, -1, -1):
        taken = rig.storage.batched_allocate(shape, dtype, 1, fmt, busy_loop=False)
        held.append(References(taken or []))
        assert len(rig.cpu) == left
        assert rig.engine.lookup(TOKENS, search_range=["LocalCPUBackend"]) == left * 8
    for taken in held:
        taken.release()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prompt_stored_in_steps(policy: str) -> None:
    with EngineRig(pool_chunks=CHUNKS, policy=policy) as rig:
        store_in_steps(rig)
        check_the_end_goes_first(rig)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prompt_that_was_loaded(policy: str, pin: bool, layerwise: bool) -> None:
    with EngineRig(pool_chunks=CHUNKS, policy=policy) as rig:
        store_in_steps(rig)
        assert rig.engine.lookup(TOKENS, lookup_id="r", pin=pin) == len(TOKENS)
        slots = rig.model.slots(PAGES, len(TOKENS))
        load = rig.engine.retrieve_layer if layerwise else rig.engine.retrieve
        loaded = load(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots, req_id="r")
        assert (list(loaded)[-1] if layerwise else loaded).all()
        check_the_end_goes_first(rig)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prompt_that_came_from_two_tiers(policy: str) -> None:
    with EngineRig(pool_chunks=CHUNKS, policy=policy, tiers=[DictBackend]) as rig:
        rig.fill(TOKENS, PAGES)
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        rig.cpu.batched_remove(keys[1:3])
        slots = rig.model.slots(PAGES, len(TOKENS))
        assert rig.engine.retrieve(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots).all()
        assert len(rig.cpu) == CHUNKS
        check_the_end_goes_first(rig)


def test_storing_the_next_part_is_no_use_of_the_first() -> None:
    with EngineRig(pool_chunks=CHUNKS + 2, policy="lfu") as rig:
        other = list(range(900, 916))
        rig.fill(other, [50, 51, 52, 53])
        slots = rig.model.slots([50, 51, 52, 53], 16)
        assert rig.engine.retrieve(other, kvcaches=rig.model.caches, slot_mapping=slots).all()
        store_in_steps(rig)
        check_the_end_goes_first_of_two(rig, other)


def check_the_end_goes_first_of_two(rig: EngineRig, other: list[int]) -> None:
    """All four chunks stored in steps, used once, go before those that were used twice."""
    shape, dtype, fmt = rig.connector.chunk_shape(8)
    taken = References(rig.storage.batched_allocate(shape, dtype, CHUNKS, fmt) or [])
    assert rig.engine.lookup(other) == len(other)
    assert rig.engine.lookup(TOKENS) == 0
    taken.release()


def test_a_prompt_that_a_lookup_has_promoted(tmp_path: Path) -> None:
    pool = make_pool(CHUNKS)
    keys = make_keys(CHUNKS)
    disk = make_disk(pool, tmp_path)
    put(disk, pool, keys)
    lease = Lease("r", time.monotonic() + 60)
    assert disk.batched_contains(keys, pin=lease) == CHUNKS
    lease.release()
    for left in range(CHUNKS - 1, -1, -1):
        held = pool.batched_allocate(
            SHAPE, DTYPE, CHUNKS - left, MemoryFormat.OPAQUE_PAGES, busy_loop=False
        )
        References(held or []).release()
        assert sorted(pool.keys()) == sorted(keys[:left])
    disk.close()
    assert pool.memcheck().used_bytes == 0
    pool.close()


def test_the_default_policy_learns_what_follows_what() -> None:
    run = PolicyRun(ReusePolicy())
    run.put(0, 1, 2, 3)
    run.policy.note_order([policy_key(number) for number in (0, 1, 2, 3)], run.mapping)
    assert run.candidates(4) == [3, 2, 1, 0]


def test_the_order_on_the_disk() -> None:
    index = DiskIndex(LRUPolicy())
    keys = make_keys(6)
    meta = ChunkMeta(MemoryFormat.OPAQUE_PAGES, "uint8", (3, 4, 16))
    for part in (keys[:2], keys[2:4], keys[4:]):
        for key, entry in index.begin([(key, meta) for key in part]).items():
            assert index.finish(key, entry)
        index.note_order(keys)
    assert [index.pop_victim() for _ in keys] == keys[::-1]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_chunks_that_are_not_there_are_skipped(policy: str) -> None:
    order = create_policy(policy)
    mapping = order.init_mutable_mapping()
    order.note_order(make_keys(3), mapping)
    assert len(mapping) == 0
    assert order.get_evict_candidates(mapping, 3, lambda obj: True) == []
