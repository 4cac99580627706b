"""The replay: only an unbroken prefix counts, and the tier behaves like the real one."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvkeep.policy.classic import FIFOPolicy, LRUPolicy, MRUPolicy
from kvkeep.policy.probation import ProbationPolicy
from kvkeep.policy.reuse import ReusePolicy
from kvkeep.replay.sweep import SimulatedTier, replay
from kvkeep.replay.trace import parse_trace, trace_of

POLICIES = [FIFOPolicy, LRUPolicy, MRUPolicy, ProbationPolicy, ReusePolicy]


def tree_prompts(seed, count):
    """Prompts that are paths through a random tree."""
    chance = random.Random(seed)
    prompts, free = [[0]], 1
    for _ in range(count):
        base = chance.choice(prompts[-30:])
        prompt = base[: chance.randint(1, len(base))]
        new = chance.randint(0, 4)
        prompts.append(prompt + list(range(free, free + new)))
        free += new
    return prompts


def test_tokens_of_a_short_last_chunk_count_as_they_are():
    line = b'{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1, 2]}'
    rate = replay(parse_trace([line, line]), LRUPolicy(), 10)
    assert (rate.asked_tokens, rate.hit_tokens) == (1400, 700)
    assert (rate.asked_chunks, rate.hit_chunks) == (4, 2)
    assert rate.token_share == rate.chunk_share == 0.5


def test_a_broken_prefix_finds_nothing_after_the_gap():
    tier = SimulatedTier(MRUPolicy(), 4)
    keys = trace_of([[1, 2, 3, 4]]).requests[0].keys
    tier.serve(keys[:1])
    tier.serve(keys)
    other = trace_of([[9]]).requests[0].keys
    tier.serve(other)  # MRU lets the first chunk of the prompt go
    assert tier.serve(keys) < 4


@pytest.mark.parametrize("policy", POLICIES)
def test_never_more_than_fits_and_never_its_own_prefix(policy):
    tier = SimulatedTier(policy(), 12)
    for request in trace_of(tree_prompts(1, 600)).requests:
        tier.serve(request.keys)
        assert len(tier) <= 12
        kept = min(len(request.keys), 12)
        assert tier.serve(request.keys) == kept


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_that_is_large_enough_finds_all_that_came_before(policy):
    trace = trace_of(tree_prompts(2, 500))
    seen, expected = set(), 0
    for request in trace.requests:
        expected += sum(key in seen for key in request.keys)
        seen.update(request.keys)
    rate = replay(trace, policy(), len(seen))
    assert rate.hit_chunks == expected
    assert rate.num_evictions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_that_never_fit_do_no_harm(policy):
    trace = trace_of([list(range(100)), list(range(200, 300))] * 3)
    rate = replay(trace, policy(), 10)
    assert 0 <= rate.hit_chunks <= rate.asked_chunks


def test_lru_is_lru():
    """Against a model of LRU over single chunks."""
    chance = random.Random(4)
    numbers = [int(chance.paretovariate(0.8)) % 500 for _ in range(4000)]
    model, hits = OrderedDict(), 0
    for number in numbers:
        hits += number in model
        model[number] = None
        model.move_to_end(number)
        if len(model) > 50:
            model.popitem(last=False)
    assert replay(trace_of([[n] for n in numbers]), LRUPolicy(), 50).hit_chunks == hits
