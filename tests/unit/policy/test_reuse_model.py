"""Hazards are learned from censored waits, and the index says what waiting is worth."""

from __future__ import annotations

import random

import pytest

from kvkeep.policy.reuse import (
    GROUP_ODDS,
    GROUPS,
    NUM_AGES,
    NUM_BUCKETS,
    NUM_CLASSES,
    ReuseModel,
    class_of_new,
    class_of_used,
)


def learn(model, chunk_class, lifetimes, *, epochs=NUM_AGES * 3, arrivals=20, seed=1):
    """Chunks come in each epoch and are used after a time that ``lifetimes(chance)`` draws."""
    chance = random.Random(seed)
    due: dict[int, list[int]] = {}
    for epoch in range(epochs):
        for start in due.pop(epoch, []):
            model.wait_again(chunk_class, epoch - start, chunk_class, 1)
            model.forget(chunk_class, 0)  # one use each
        for _ in range(arrivals):
            model.start_waiting(chunk_class)
            life = lifetimes(chance)
            if life is not None:
                due.setdefault(epoch + max(1, life), []).append(epoch)
        model.end_epoch()


def test_a_constant_hazard_is_found():
    model = ReuseModel((0,), (1.0,))
    learn(model, 0, lambda chance: int(chance.expovariate(0.05)) + 1)
    hazards = model.hazards(100)[0]
    assert hazards[4:10] == pytest.approx([0.05] * 6, rel=0.25)


def test_waits_that_do_not_end_lower_the_hazard():
    model = ReuseModel((0,), (1.0,))
    learn(model, 0, lambda chance: 10 if chance.random() < 0.25 else None)
    assert sum(model.hazards(100)[0][9:]) < 0.02


def test_the_index_looks_ahead_to_late_reuse():
    """All chunks come back after 30 epochs: one that waited for 25 is worth more than a new one."""
    model = ReuseModel((0,), (1.0,))
    learn(model, 0, lambda chance: 26 + chance.randrange(6))
    index = model.indices(100)[0]
    assert index[9] > 2 * index[0]
    assert index[-1] < index[0]


def test_a_falling_hazard_makes_a_falling_index():
    index = ReuseModel((0,), (1.0,)).indices(1000)[0]
    assert index == sorted(index, reverse=True)
    assert len(index) == NUM_BUCKETS


def test_a_class_without_evidence_leans_on_its_group():
    model = ReuseModel((0, 0, 1), (1.0, 1.0))
    learn(model, 0, lambda chance: int(chance.expovariate(0.1)) + 1)
    learn(model, 2, lambda chance: None)
    index = model.indices(100)
    assert index[1][5] > 3 * index[2][5]


def test_what_was_learned_fades():
    model = ReuseModel((0,), (1.0,))
    learn(model, 0, lambda chance: 5)
    before = model.hazards(100)[0]
    learn(model, 0, lambda chance: None, epochs=NUM_AGES * 12)
    assert model.hazards(100)[0][4] < before[4] / 2


def test_waiting_counts_balance():
    model = ReuseModel((0, 0), (1.0,))
    learn(model, 1, lambda chance: chance.choice([3, 40, 100]), epochs=400)
    assert all(number >= 0 for number in model._waiting)
    assert sum(model._waiting) == model.waiting_by_bucket().sum()


def test_classes_cover_their_range():
    new = {
        class_of_new(before, length, is_end=end)
        for before in (0, 1, 4, 5, 1000)
        for length in (1, 4, 16, 32, 64, 5000)
        for end in (False, True)
    }
    used = {class_of_used(uses, gap) for uses in (2, 3, 5, 999) for gap in (0.0, 0.1, 0.3, 9.0)}
    assert not new & used
    assert new | used == set(range(NUM_CLASSES))
    assert len(GROUPS) == NUM_CLASSES
    assert set(GROUPS) == set(range(len(GROUP_ODDS)))
