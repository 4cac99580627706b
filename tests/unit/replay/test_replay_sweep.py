"""Sweeps: sizes, policies, and the sentence about memory."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvkeep.errors import ConfigError
from kvkeep.policy.classic import LRUPolicy
from kvkeep.replay.sweep import (
    POLICY_NAMES,
    check_policies,
    chunks_of_share,
    chunks_of_size,
    optimum,
    replay,
    sweep,
    what_memory_buys,
)
from kvkeep.replay.trace import trace_of

#: Two prompts of two chunks in turn: a pool of two finds nothing, one of four all but the first.
TRACE = trace_of([[1, 2], [3, 4]] * 5, chunk_tokens=10)


def test_each_size_is_run_once_with_each_policy_from_an_empty_pool():
    reports = []
    results = sweep(TRACE, [4, 2, 2], ["lru", "reuse"], lambda *report: reports.append(report))
    assert [one.chunks for one in results.sizes] == [2, 4]
    assert (results.num_requests, results.asked_tokens, results.footprint) == (10, 200, 4)
    for one in results.sizes:
        assert list(one.by_policy) == ["lru", "reuse"]
        assert one.by_policy["lru"] == replay(TRACE, LRUPolicy(), one.chunks)
        assert one.best == optimum(TRACE, one.chunks)
    assert results.sizes[1].by_policy["lru"].hit_tokens == 160 == results.limit.hit_tokens
    assert [done for done, _, _ in reports] == list(range(7))
    assert {total for _, total, _ in reports} == {7}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_runs_by_its_name_and_is_no_better_than_the_optimum(name):
    [one] = sweep(TRACE, [3], [name], lambda *_: None).sizes
    assert one.by_policy[name].hit_tokens <= one.best.hit_tokens > 0


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match="'best'; known: fifo, lfu, lru, mru, probation, reuse"):
        check_policies(["lru", "best"])


def test_sizes_in_chunks():
    assert chunks_of_size(1000, 300) == 3
    with pytest.raises(ConfigError, match="holds no block"):
        chunks_of_size(299, 300)
    assert chunks_of_share(Fraction(1, 4), 10) == 2
    assert chunks_of_share(Fraction(1, 100), 10) == 1


def test_the_sentence_says_what_more_memory_finds():
    results = sweep(TRACE, [2, 4], ["lru"], lambda *_: None)
    assert what_memory_buys(results, "lru", "{} chunks".format) == (
        "With lru, 2 chunks finds 0.0% of all prompt tokens; 2 chunks more finds +80.0 points "
        "(80.0%). Nothing finds more than 80.0%, which takes at most 4 chunks."
    )
