"""The clairvoyant bound: no policy is above it, and an exhaustive search is not either."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvkeep.policy.classic import LRUPolicy
from kvkeep.policy.probation import ProbationPolicy
from kvkeep.policy.reuse import ReusePolicy
from kvkeep.replay.sweep import optimum, replay
from kvkeep.replay.trace import trace_of


def path(number):
    """Chunk numbers from the root of a binary tree to a node."""
    chain = [number]
    while chain[-1]:
        chain.append((chain[-1] - 1) // 2)
    return chain[::-1]


def best_of_all(prompts, capacity):
    """The most chunks found in unbroken prefixes, by trying every set to keep after each prompt."""

    @cache
    def most(step, kept):
        if step == len(prompts):
            return 0
        found = 0
        for key in prompts[step]:
            if key not in kept:
                break
            found += 1
        choices = kept | set(prompts[step])
        size = min(capacity, len(choices))
        return found + max(
            most(step + 1, frozenset(some)) for some in combinations(sorted(choices), size)
        )

    return most(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=7), st.integers(1, 4))
def test_it_is_the_best_of_all(ends, capacity):
    prompts = [path(end) for end in ends]
    assert optimum(trace_of(prompts), capacity).hit_chunks == best_of_all(prompts, capacity)


@pytest.mark.parametrize("policy", [LRUPolicy, ProbationPolicy, ReusePolicy])
@settings(max_examples=50, deadline=None)
@given(ends=st.lists(st.integers(0, 60), max_size=60), capacity=st.integers(1, 20))
def test_no_policy_is_above_it(policy, ends, capacity):
    trace = trace_of([path(end) for end in ends])
    bound = optimum(trace, capacity)
    assert replay(trace, policy(), capacity).hit_chunks <= bound.hit_chunks
    assert bound.asked_chunks == sum(len(path(end)) for end in ends)


def test_more_room_is_never_worse():
    trace = trace_of([path(n * 7 % 61) for n in range(300)])
    found = [optimum(trace, capacity).hit_chunks for capacity in range(1, 62)]
    assert found == sorted(found)
