"""Hit rates agree with those of simulators that share nothing with this one.

LRU and the optimum with the package kvcache-simulator, which counts requests after a warm-up; FIFO,
LFU and LRU with a few lines below that look through everything for the next victim. The workloads
are the starts of recorded ones; benchmarks/simulators.py compares on whole ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_file

from kvkeep.replay.sweep import new_policy, optimum, replay
from kvkeep.replay.trace import MOONCAKE_BLOCK_TOKENS, read_trace

TRACES = sorted((Path(__file__).parents[2] / "traces").glob("*.jsonl"))
SHARES = (64, 16, 8, 4)


@pytest.fixture(scope="module", params=TRACES, ids=lambda path: path.stem)
def both(request):
    """The workload as each of the two reads it."""
    theirs = parse_trace_file(request.param, block_size=MOONCAKE_BLOCK_TOKENS)
    return read_trace(request.param), build_execution_plan(theirs)


@pytest.mark.parametrize("share", SHARES)
def test_the_optimum_is_that_of_another_simulator(both, share):
    trace, plan = both
    capacity = trace.footprint() // share
    theirs = simulate_policy(plan, "optimal", capacity)
    ours = optimum(trace, capacity, num_warm_up=plan.warmup_requests)
    assert theirs.measurementMode == "fixed_window"
    assert (ours.hit_tokens, ours.asked_tokens) == (theirs.hitTokens, theirs.totalTokens)


@pytest.mark.parametrize("share", SHARES)
def test_lru_is_that_of_another_simulator_but_for_a_few_blocks(both, share):
    """It evicts between the blocks of one prompt, this one before the first of them."""
    trace, plan = both
    capacity = trace.footprint() // share
    theirs = simulate_policy(plan, "lru", capacity)
    ours = replay(trace, new_policy("lru"), capacity, num_warm_up=plan.warmup_requests)
    assert ours.asked_tokens == theirs.totalTokens
    assert abs(ours.hit_tokens - theirs.hitTokens) <= 2 * MOONCAKE_BLOCK_TOKENS


class Naive:
    """A tier that looks through all it has for the block to give up."""

    def __init__(self, policy, capacity):
        self.policy, self.capacity = policy, capacity
        self.entries = {}  # key -> [uses, time of arrival, time of last use]
        self.now = 0

    def rank(self, key):
        uses, arrival, used = self.entries[key]
        return {"fifo": (arrival,), "lru": (used,), "lfu": (uses, used)}[self.policy]

    def serve(self, keys):
        found = 0
        while found < len(keys) and keys[found] in self.entries:
            found += 1
        for key in reversed(keys[:found]):
            self.now += 1
            entry = self.entries[key]
            entry[0], entry[2] = entry[0] + 1, self.now
        missing = [key for key in keys[found:] if key not in self.entries]
        spare = set(self.entries) - set(keys)
        while len(self.entries) + len(missing) > self.capacity and spare:
            victim = min(spare, key=self.rank)
            spare.remove(victim)
            del self.entries[victim]
        room = self.capacity - len(self.entries)
        for key in reversed(missing[:room]):
            self.now += 1
            self.entries[key] = [1, self.now, self.now]
        return found


@pytest.mark.parametrize("policy", ["fifo", "lru", "lfu"])
@pytest.mark.parametrize("share", [64, 8])
def test_policies_are_those_of_a_naive_simulator(both, policy, share):
    trace, _ = both
    capacity = trace.footprint() // share
    naive = Naive(policy, capacity)
    found = sum(naive.serve(request.keys) for request in trace.requests)
    assert found == replay(trace, new_policy(policy), capacity).hit_chunks
    assert found > 0
