"""Synthetic workloads: reproducible, prefix trees, and of the kind they say they are."""

from __future__ import annotations

import pytest

from kvkeep.policy.classic import LRUPolicy
from kvkeep.policy.reuse import ReusePolicy
from kvkeep.replay.sweep import optimum, replay
from kvkeep.replay.workloads import WORKLOADS, workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_is_a_trace_of_chains(name):
    trace = workload(name, seed=1, size=600)
    assert trace == workload(name, seed=1, size=600)
    assert name == "loops" or trace != workload(name, seed=2, size=600)
    assert 400 <= len(trace.requests) <= 700
    before = {}
    for request in trace.requests:
        for one, other in zip((None, *request.keys), request.keys, strict=False):
            assert before.setdefault(other, one) == one


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_default_policy_is_about_lru_or_better_on_seeds_it_was_not_made_with(name):
    """A hold-out in small: no workload loses more than two points against LRU."""
    trace = workload(name, seed=101, size=1200)
    for share in (16, 4):
        capacity = trace.footprint() // share
        lru = replay(trace, LRUPolicy(), capacity).token_share
        ours = replay(trace, ReusePolicy(), capacity).token_share
        assert lru - 0.02 <= ours <= optimum(trace, capacity).token_share
