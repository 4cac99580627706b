"""Asynchronous lookups over a real disk tier: read, verified and held before they are answered."""

from __future__ import annotations

import pytest

from kvkeep.testing.chunks import wait_until
from support.disk import chunk_files, make_disk
from support.engine_rig import EngineRig

TOKENS = list(range(100, 148))  # six chunks of eight tokens
CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"
WAIT_S = 20


@pytest.fixture
def rig(tmp_path):
    """Six chunks that only the disk has."""
    with EngineRig(tiers=[lambda cpu: make_disk(cpu, tmp_path)]) as rig:
        rig.fill(TOKENS)
        disk = rig.storage.storage_backends[DISK]
        assert disk.flush(WAIT_S)
        rig.cpu.clear()
        yield rig
        wait_until(lambda: rig.engine.check().num_objects == rig.engine.check().num_chunks)
        assert len(rig.storage.prefetcher.events) == 0
        wait_until(lambda: rig.storage.prefetcher.num_chunks_held == 0)


def keys_of(rig):
    return rig.engine.token_database.process_tokens(TOKENS).keys


def retrieve(rig, lookup_id: str) -> int:
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


def test_from_the_disk_into_memory_and_held(rig):
    found = rig.engine.async_lookup(TOKENS, lookup_id="r").result(WAIT_S)
    assert (found, found.tiers) == (48, ((DISK, 48),))
    assert {obj.pin_count for obj in rig.cpu.hot_cache.values()} == {1}
    rig.storage.storage_backends[DISK].clear()
    assert retrieve(rig, "r") == 48


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_damaged_chunk_ends_the_prefix(rig, tmp_path, number):
    """Fault 5: what does not verify is never answered for; what comes after it is let go."""
    name = keys_of(rig)[number].hex()
    [path] = [path for path in chunk_files(tmp_path) if path.name.startswith(name)]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert rig.engine.async_lookup(TOKENS, lookup_id="r").result(WAIT_S) == 8 * number
    assert retrieve(rig, "r") == 8 * number


def test_chunks_that_another_process_wrote(rig, tmp_path):
    """The index does not know them; the disk is asked without anybody waiting."""
    disk = rig.storage.storage_backends[DISK]
    for key in keys_of(rig):
        disk._index.forget(key)
    assert disk.keys() == []
    future = disk.batched_async_contains(keys_of(rig))
    assert future.result(WAIT_S) == 6
    assert rig.engine.async_lookup(TOKENS, lookup_id="r").result(WAIT_S) == 48
    assert retrieve(rig, "r") == 48


def test_a_disk_that_is_left_out_has_nothing(rig):
    rig.storage.set_bypassed(DISK, True)
    assert rig.engine.async_lookup(TOKENS, lookup_id="r").result(WAIT_S) == 0
    rig.storage.set_bypassed(DISK, False)
    disk = rig.storage.storage_backends[DISK]
    disk.close()
    assert disk.batched_async_contains(keys_of(rig)).result(WAIT_S) == 0
    assert rig.engine.async_lookup(TOKENS, lookup_id="r").result(WAIT_S) == 0
