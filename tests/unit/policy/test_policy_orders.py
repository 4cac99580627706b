"""Each policy's order against a naive model, what it costs, and the table of names."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvkeep.errors import ConfigError
from kvkeep.policy.names import POLICIES, create_policy
from kvkeep.testing.policies import PolicyRun, make_key

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "hit", "evict", "pin"]), st.integers(0, 9)), max_size=60
)


class Model:
    """The time of arrival, the time of the last use and the number of uses of every chunk."""

    def __init__(self):
        self.entries = {}
        self.time = 0

    def apply(self, action, number):
        """Do it, if it can be done; says whether it was."""
        self.time += 1
        if (number in self.entries) == (action == "put"):
            return False
        if action == "put":
            self.entries[number] = [self.time, self.time, 1]
        elif action == "hit":
            self.entries[number][1] = self.time
            self.entries[number][2] += 1
        elif action == "evict":
            del self.entries[number]
        return True

    def order(self, name):
        rank = {
            "fifo": lambda number: self.entries[number][0],
            "lru": lambda number: self.entries[number][1],
            "mru": lambda number: -self.entries[number][1],
            "lfu": lambda number: (self.entries[number][2], self.entries[number][1]),
        }[name]
        return sorted(self.entries, key=rank)


@pytest.mark.parametrize("name", ["fifo", "lfu", "lru", "mru"])
@given(steps=STEPS)
def test_candidates_are_in_the_order_of_the_model(name, steps):
    run, model, pinned = PolicyRun(POLICIES[name]()), Model(), set()
    for action, number in steps:
        if not model.apply(action, number):
            continue
        if action == "pin":
            pinned ^= {number}
            run.mapping[make_key(number)] = number not in pinned
        else:
            pinned -= {number} if action == "evict" else set()
            getattr(run, action)(number)
        expected = [number for number in model.order(name) if number not in pinned]
        assert run.candidates(99) == expected
        assert run.candidates(2) == expected[:2]


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("size", [100, 10_000])
def test_a_candidate_costs_the_same_in_a_large_cache(name, size):
    run = PolicyRun(POLICIES[name]())
    run.put(*range(size))
    run.hit(*range(0, size, 3))
    looked_at = []
    keys = run.policy.get_evict_candidates(
        run.mapping, 5, lambda idle: looked_at.append(idle) or True
    )
    assert len(keys) == 5
    assert len(looked_at) <= 6


def test_lfu_keeps_no_empty_buckets():
    run = PolicyRun(POLICIES["lfu"]())
    run.put(0, 1)
    run.hit(*[0] * 50)
    run.hit(1)
    run.evict(0, 1)
    assert run.policy._ring.next is run.policy._ring
    assert run.policy._ring.previous is run.policy._ring


@pytest.mark.parametrize("name", ["lru", "LRU", "Lru", " lru "])
def test_names_are_case_insensitive(name):
    assert create_policy(name).name == "lru"


def test_every_policy_is_in_the_table_under_its_name():
    assert set(POLICIES) == {"fifo", "lfu", "lru", "mru", "reuse"}
    for name in POLICIES:
        assert create_policy(name).name == name
    assert create_policy("lru") is not create_policy("lru")


@pytest.mark.parametrize("name", ["", "arc", "lrux"])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(ConfigError, match="fifo, lfu, lru, mru, reuse"):
        create_policy(name)
