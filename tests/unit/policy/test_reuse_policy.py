"""The default policy: the contract, chains, what it learns, what it costs."""

from __future__ import annotations

import random
from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvkeep.policy import reuse
from kvkeep.policy.reuse import ReusePolicy, uses_of
from kvkeep.testing.policies import PolicyContract, PolicyRun, make_key


class TestReusePolicy(PolicyContract):
    @pytest.fixture
    def make_policy(self):
        return ReusePolicy


def store(run, *numbers):
    """A prompt is stored as the CPU tier stores it: noted, then put from its end on."""
    keys = [make_key(number) for number in numbers]
    found = next((n for n, key in enumerate(keys) if key not in run.mapping), len(keys))
    run.policy.note_chain(keys[max(found - 1, 0) :])
    run.hit(*reversed(numbers[:found]))
    run.put(*(n for n in reversed(numbers) if make_key(n) not in run.mapping))


@pytest.fixture
def run():
    return PolicyRun(ReusePolicy())


def test_a_chain_goes_from_its_end(run):
    store(run, 1, 2, 3, 4)
    assert run.candidates(4) == [4, 3, 2, 1]
    run.evict(4)
    assert run.candidates(2) == [3, 2]


def test_a_chunk_with_two_successors_goes_after_both(run):
    store(run, 1, 2, 3)
    store(run, 1, 2, 4)
    order = run.candidates(9)
    assert sorted(order[:2]) == [3, 4]
    assert order[2:] == [2, 1]


def test_a_chunk_whose_successor_cannot_go_comes_last(run):
    store(run, 1, 2, 3)
    store(run, 7, 8)
    run.mapping[make_key(3)] = False
    assert run.candidates(9) == [8, 7, 1, 2] or set(run.candidates(9)[2:]) == {1, 2}
    assert run.candidates(2) == [8, 7]


def test_a_successor_that_was_left_behind_goes_too(run):
    """A predecessor that is removed on purpose does not hide or hold what came after it."""
    store(run, 1, 2, 3)
    run.evict(2)
    assert sorted(run.candidates(9)) == [1, 3]
    store(run, 1, 2, 3)
    assert run.candidates(9) == [3, 2, 1]


def test_a_chain_that_is_put_from_its_start_is_the_same(run):
    run.policy.note_chain([make_key(n) for n in (1, 2, 3)])
    run.put(1, 2, 3)
    assert run.candidates(3) == [3, 2, 1]


def test_a_noted_chain_need_not_be_put(run):
    run.policy.note_chain([make_key(n) for n in range(5)])
    run.policy.note_chain([])
    run.policy.note_chain([make_key(0)])
    run.put(9)
    assert run.candidates(5) == [9]


def test_noting_is_bounded():
    policy = ReusePolicy()
    policy.init_mutable_mapping()
    for start in range(0, 200_000, 1000):
        policy.note_chain([make_key(n) for n in range(start, start + 1000)])
    assert len(policy._noted) == 1 << 16


def test_what_is_remembered_is_bounded():
    """Names of chunks that went are kept for eight turnovers of the pool, not for ever."""
    run = PolicyRun(ReusePolicy())
    for number in range(5000):
        run.put(number)
        if number >= 100:
            run.evict(*run.candidates(1))
    assert len(run.policy._gone) == 800
    waiting = sum(run.policy._model._waiting)
    assert waiting <= 900
    assert waiting == run.policy._model.waiting_by_bucket().sum()


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "evict", "remove", "pin"]), st.integers(0, 30)),
        max_size=80,
    )
)
def test_evicting_candidates_never_breaks_a_chain(steps):
    """Whatever happens: without pins and removals no prefix goes before its suffix."""
    run, removed, pinned = PolicyRun(ReusePolicy()), set(), set()

    def prompt(number):  # a tree: 0-1-3-7..., each number's predecessor is (number - 1) // 2
        chain = [number]
        while chain[-1]:
            chain.append((chain[-1] - 1) // 2)
        return chain[::-1]

    for action, number in steps:
        stored = {int.from_bytes(key, "big") for key in run.mapping}
        if action == "store":
            store(run, *prompt(number))
            removed -= set(prompt(number))
        elif action == "evict":
            chosen = run.candidates(number)
            assert len(chosen) == min(number, len(stored - pinned))
            for gone in chosen:
                run.evict(gone)
                stored.discard(gone)
                if not removed and not pinned:
                    assert not {2 * gone + 1, 2 * gone + 2} & stored
        elif number in stored and action == "remove":
            run.evict(number)
            removed.add(number)
            pinned.discard(number)
        elif number in stored:
            pinned.add(number)
            run.mapping[make_key(number)] = False


def serve(run, keys, capacity):
    """One chunk is asked for; whether it was there."""
    number = keys
    if make_key(number) in run.mapping:
        run.hit(number)
        return True
    if len(run.mapping) >= capacity:
        run.evict(*run.candidates(1))
    run.put(number)
    return False


def test_a_loop_that_is_too_large_keeps_a_part():
    """LRU finds nothing in a loop over more chunks than fit; a fixed part of it can be kept."""
    run, hits = PolicyRun(ReusePolicy()), 0
    for step in range(40_000):
        hits += serve(run, step % 1000, 500)
    assert hits / 40_000 > 0.35


def test_recent_reuse_is_served_like_lru():
    run, lru, hits, lru_hits = PolicyRun(ReusePolicy()), OrderedDict(), 0, 0
    chance = random.Random(3)
    recent = list(range(400))
    for step in range(30_000):
        fresh = chance.random() < 0.2
        number = 1000 + step if fresh else recent.pop(-1 - min(399, int(chance.expovariate(0.01))))
        recent.append(number)
        del recent[:-400]
        hits += serve(run, number, 200)
        lru_hits += number in lru
        lru[number] = None
        lru.move_to_end(number)
        if len(lru) > 200:
            lru.popitem(last=False)
    assert hits > 0.97 * lru_hits


def test_popular_chunks_survive_a_scan():
    run = PolicyRun(ReusePolicy())
    chance = random.Random(5)
    for step in range(20_000):
        serve(run, chance.randrange(100) if step % 2 else 1000 + step, 200)
    for number in range(100_000, 100_400):
        serve(run, number, 200)
    assert sum(make_key(number) in run.mapping for number in range(100)) > 90


def test_uses_within_a_moment_count_as_one(run):
    """A prompt that waits is looked up again and again; that is no sign that it is popular."""
    for number in range(200):
        run.put(number)
    for _ in range(50):
        run.hit(199)
    assert uses_of(run.policy._stored[make_key(199)]) <= 2


def test_the_names_that_are_remembered_are_bounded(monkeypatch):
    """A large pool remembers one turnover, a small one several, none without end."""
    monkeypatch.setattr(reuse, "_MAX_GONE", 300)
    for capacity, remembered in ((30, 300), (500, 500)):
        policy = ReusePolicy()
        run = PolicyRun(policy)
        for number in range(3000):
            run.put(number)
            if number >= capacity:
                run.evict(*run.candidates(1))
        assert len(policy._gone) == remembered
