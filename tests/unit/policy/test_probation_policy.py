"""Probation: the contract, and its two queues and the names of what went."""

from __future__ import annotations

import pytest

from kvkeep.policy.probation import ProbationPolicy
from kvkeep.testing.policies import PolicyContract, PolicyRun, make_key


class TestProbationPolicy(PolicyContract):
    @pytest.fixture
    def make_policy(self):
        return ProbationPolicy


@pytest.fixture
def run():
    return PolicyRun(ProbationPolicy())


def test_newcomers_that_were_not_used_go_first(run):
    run.put(*range(10))
    run.hit(0, 1)
    assert run.candidates(2) == [2, 3]
    run.evict(2)
    assert run.candidates(1) == [3]


def test_what_comes_again_stays(run):
    run.put(*range(10))
    run.evict(0)
    run.put(0, *range(20, 30))
    assert 0 not in run.candidates(15)


def test_a_name_is_forgotten_in_time(run):
    run.put(*range(10))
    run.evict(0)
    for number in range(100, 130):
        run.put(number)
        run.evict(*run.candidates(1))
    run.put(0)
    assert make_key(0) in run.policy._new


def test_the_main_queue_is_in_order_of_use(run):
    run.put(*range(4), 8, 9)
    run.evict(0, 1, 2, 3)
    run.put(0, 1, 2, 3)
    run.evict(8, 9)
    run.hit(1, 0)
    assert run.candidates(4) == [2, 3, 1, 0]
