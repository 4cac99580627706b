"""The same workload through a real engine: real bytes, compared, and the same hit rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.replay.real import RealTiers, replay_real
from kvkeep.replay.sweep import new_policy, replay
from kvkeep.replay.trace import Trace, read_workload, trace_of

TRACES = sorted((Path(__file__).parents[2] / "traces").glob("*.jsonl"))


def start_of(path, count=150):
    trace = read_workload(path)
    return Trace(trace.requests[:count], trace.chunk_tokens)


def ignore(done, total, doing):
    pass


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
@pytest.mark.parametrize("policy", ["reuse", "lru", "lfu"])
def test_the_real_store_finds_what_the_simulation_says(path, policy):
    trace = start_of(path)
    capacity = trace.footprint() // 8
    run = replay_real(trace, RealTiers(policy, capacity, 0, None, 4096), ignore)
    simulated = replay(trace, new_policy(policy), capacity)
    assert (run.wrong_chunks, run.failures) == (0, 0)
    assert run.loaded_chunks == run.rate.hit_chunks > 0
    assert run.rate.asked_tokens == simulated.asked_tokens
    # the engine orders a prompt anew after each store, the simulation does not
    assert abs(run.rate.token_share - simulated.token_share) < 0.01
    assert run.moved_bytes >= 4096 * (run.loaded_chunks + len(trace.requests))


def test_a_disk_below_finds_more_and_every_byte_is_right(tmp_path):
    trace = start_of(TRACES[1], 60)
    capacity = trace.footprint() // 8
    alone = replay_real(trace, RealTiers("lru", capacity, 0, None, 4096), ignore)
    both = replay_real(trace, RealTiers("lru", capacity, 8 * capacity, tmp_path, 4096), ignore)
    assert both.wrong_chunks == 0
    assert both.rate.hit_tokens > alone.rate.hit_tokens
    assert both.found_tokens["LocalDiskBackend"] > 0


def test_a_wrong_byte_is_seen(monkeypatch):
    """The comparison can fail: bytes are changed behind the engine's back."""
    trace = trace_of([[1, 2], [1, 2]], chunk_tokens=256)
    whole = PagedGPUConnector.batched_to_gpu

    def spoil(self, objs, *arguments, **options):
        if len(objs) > 1:  # the self-test moves one at a time
            objs[0].array[5] ^= 1
        whole(self, objs, *arguments, **options)

    monkeypatch.setattr(PagedGPUConnector, "batched_to_gpu", spoil)
    run = replay_real(trace, RealTiers("lru", 8, 0, None, 4096), ignore)
    assert (run.loaded_chunks, run.wrong_chunks) == (2, 1)


def test_prompts_below_a_chunk_are_asked_for_and_not_found():
    trace = trace_of([[], [1], [1]], chunk_tokens=16)
    run = replay_real(trace, RealTiers("lru", 8, 0, None, 4096), ignore)
    assert run.rate.hit_chunks == 1


def test_the_warm_up_is_served_and_not_counted():
    trace = trace_of([[1], [1], [1]], chunk_tokens=16)
    run = replay_real(trace, RealTiers("lru", 8, 0, None, 4096), ignore, num_warm_up=2)
    assert (run.rate.asked_chunks, run.rate.hit_chunks, run.loaded_chunks) == (1, 1, 2)
