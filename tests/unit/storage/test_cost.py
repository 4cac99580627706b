"""The cost rule: what pays, what is measured, and that no tier is left out for ever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.metrics import Metrics
from kvkeep.storage.cost import TOO_SLOW, CostOptions, Line, LoadCostModel, Observed, pays

TIER = "Slow"
CHUNK = 100
SKIPPED = f'kvkeep_tier_skipped_tokens_total{{tier="{TIER}",cause="{TOO_SLOW}"}}'

seconds = st.floats(1e-6, 1e3)
units = st.integers(1, 5000)
numbers = itertools.count()


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make(**options):
    metrics, clock = Metrics(), Clock()
    rule = LoadCostModel(CostOptions(CHUNK, 1 << 20, **options), metrics, clock)
    rule.watch(TIER)
    return rule, metrics, clock


def next_prompt():
    """A prompt that nobody has asked for yet."""
    return b"prompt %d" % next(numbers)


def slow_rule(**options):
    """Computes 1,000 tokens a second; the tier takes a second for a chunk of 100."""
    rule, metrics, clock = make(**options)
    for count in (200, 400, 800):
        rule.note_prefill(count, 0.05 + count / 1000)
    assert rule.admits(TIER, 3, prompt=next_prompt()), "nothing is known of it"
    for count in (2, 4, 6):
        rule.note_load(TIER, count, float(count))
    return rule, metrics, clock


# --- lines ---


@given(start_s=st.floats(0, 10), unit_s=st.floats(1e-6, 10), counts=st.sets(units, min_size=2))
def test_a_line_is_found_again(start_s, unit_s, counts):
    observed = Observed()
    for count in sorted(counts):
        observed = observed.plus(count, start_s + unit_s * count)
    line = observed.line()
    assert line.unit_s == pytest.approx(unit_s, rel=1e-3, abs=1e-9 * start_s)
    assert line.start_s == pytest.approx(start_s, rel=1e-3, abs=1e-2 * unit_s * max(counts))


@given(observations=st.lists(st.tuples(st.integers(0, 5000), seconds), min_size=1, max_size=60))
def test_a_line_is_never_negative_and_never_falls(observations):
    observed = Observed()
    for count, took in observations:
        observed = observed.plus(count, took)
    line = observed.line()
    assert line.start_s >= 0 and line.unit_s >= 0
    assert line.start_s + line.unit_s > 0
    largest = max(took for _, took in observations)
    smallest = min(took for _, took in observations)
    mean = observed.seconds / observed.weight
    assert smallest * 0.999 <= mean <= largest * 1.001
    if any(count for count, _ in observations):
        assert observed.unit_s() > 0


def test_one_size_of_loads_is_ascribed_to_the_chunks():
    observed = Observed().plus(4, 2.0).plus(4, 2.0)
    assert observed.line() == Line(0.0, 0.5)


def test_old_observations_fade():
    observed = Observed()
    for _ in range(10):
        observed = observed.plus(1, 10.0)
    for _ in range(100):
        observed = observed.plus(1, 1.0)
    assert observed.line().unit_s < 1.1


# --- the decision ---


@given(load_s=seconds, token_s=seconds, num_chunks=units)
def test_what_is_not_measured_is_hoped_for(load_s, token_s, num_chunks):
    assert pays(None, token_s, num_chunks, CHUNK)
    assert pays(Line(0.0, load_s), None, num_chunks, CHUNK)


@given(start_s=st.floats(0, 10), unit_s=seconds, token_s=seconds, num_chunks=units, more=units)
def test_what_pays_for_some_chunks_pays_for_more(start_s, unit_s, token_s, num_chunks, more):
    load = Line(start_s, unit_s)
    if pays(load, token_s, num_chunks, CHUNK):
        assert pays(load, token_s, num_chunks + more, CHUNK)


@given(start_s=st.floats(0, 10), unit_s=seconds, token_s=seconds, num_chunks=units)
def test_a_quicker_tier_or_a_slower_engine_never_pays_less(start_s, unit_s, token_s, num_chunks):
    if pays(Line(start_s, unit_s), token_s, num_chunks, CHUNK):
        assert pays(Line(start_s / 2, unit_s / 2), token_s, num_chunks, CHUNK)
        assert pays(Line(start_s, unit_s), token_s * 2, num_chunks, CHUNK)


def test_a_start_that_only_many_chunks_earn():
    """Half a second before the first chunk; a chunk saves 0.1 s and takes 0.01 s."""
    line = Line(0.5, 0.01)
    assert [pays(line, 0.001, count, CHUNK) for count in (1, 5, 6, 100)] == [
        False,
        False,
        True,
        True,
    ]


# --- the rule ---


def test_a_slow_tier_is_left_alone_and_counted():
    """Fault 42: loading from the slow tier would take longer than computing again."""
    rule, metrics, _ = slow_rule()
    assert not rule.admits(TIER, 3, prompt=next_prompt())
    assert not rule.admits(TIER, 1000, prompt=next_prompt())
    assert metrics.snapshot()[SKIPPED] == 1003 * CHUNK
    values = metrics.snapshot()
    assert values["kvkeep_prefill_tokens_per_second"] == pytest.approx(1000, rel=1e-6)
    rate = values[f'kvkeep_expected_load_bytes_per_second{{tier="{TIER}"}}']
    assert rate == pytest.approx(1 << 20, rel=1e-6)


def test_other_tiers_are_asked():
    rule, _, _ = slow_rule()
    assert rule.admits("Other", 3, prompt=next_prompt())


def test_it_is_tried_again_by_one_lookup_and_comes_back():
    """Not a trap: one quick answer outweighs all that was known."""
    rule, _, clock = slow_rule(retry_s=30.0)
    clock.now += 29.9
    assert not rule.admits(TIER, 3, prompt=next_prompt())
    clock.now += 0.2
    assert rule.admits(TIER, 3, prompt=next_prompt())
    assert not rule.admits(TIER, 3, prompt=next_prompt()), "one lookup tries it for all"
    rule.note_load(TIER, 3, 0.01)
    assert rule.admits(TIER, 3, prompt=next_prompt())


def test_a_trial_that_is_slow_again_waits_again():
    rule, _, clock = slow_rule(retry_s=30.0)
    clock.now += 31
    assert rule.admits(TIER, 3, prompt=next_prompt())
    rule.note_load(TIER, 3, 9.0)
    assert not rule.admits(TIER, 3, prompt=next_prompt())
    clock.now += 31
    assert rule.admits(TIER, 3, prompt=next_prompt())


def test_a_trial_without_hits_leaves_the_trial_to_the_next():
    """That the tier has nothing of one prompt says nothing of its speed."""
    rule, _, clock = slow_rule(retry_s=30.0)
    clock.now += 31
    assert rule.admits(TIER, 3, prompt=next_prompt())
    rule.note_load(TIER, 0, 0.001)
    assert rule.admits(TIER, 3, prompt=next_prompt())
    rule.note_load(TIER, 3, 0.01)
    assert rule.admits(TIER, 3, prompt=next_prompt())


def test_a_trial_whose_answer_never_came_is_followed_by_another():
    rule, _, clock = slow_rule(retry_s=30.0)
    for _ in range(3):
        clock.now += 31
        assert rule.admits(TIER, 3, prompt=next_prompt())
        assert not rule.admits(TIER, 3, prompt=next_prompt())


def test_a_tier_that_never_answers_in_time_is_slow():
    """It brings nothing, and takes longer than computing would: no hit is ever seen."""
    rule, _, _ = make()
    rule.note_prefill(1000, 1.0)
    for _ in range(3):
        rule.note_load(TIER, 0, 0.7)
    assert not rule.admits(TIER, 5, prompt=next_prompt())
    assert rule.admits(TIER, 20, prompt=next_prompt()), "20 chunks would take 2 s to compute"


def test_quick_misses_are_no_loads():
    rule, metrics, _ = make()
    rule.note_prefill(1000, 1.0)
    for _ in range(100):
        assert rule.admits(TIER, 5, prompt=next_prompt())
        rule.note_load(TIER, 0, 0.0001)
    assert metrics.snapshot()[f'kvkeep_expected_load_bytes_per_second{{tier="{TIER}"}}'] == 0


def test_switched_off_it_asks_every_tier():
    rule, metrics, _ = slow_rule(enabled=False)
    assert rule.admits(TIER, 3, prompt=next_prompt())
    assert SKIPPED not in metrics.snapshot()


def test_before_anything_is_measured_the_gauges_say_nothing():
    _, metrics, _ = make()
    values = metrics.snapshot()
    assert values["kvkeep_prefill_tokens_per_second"] == 0
    assert values[f'kvkeep_expected_load_start_seconds{{tier="{TIER}"}}'] == 0


def test_a_prompt_that_is_asked_for_in_every_step_counts_once():
    rule, metrics, _ = slow_rule()
    for _ in range(50):
        assert not rule.admits(TIER, 3, prompt=b"waits")
        assert not rule.admits(TIER, 5, prompt=b"waits, too")
    assert metrics.snapshot()[SKIPPED] == 8 * CHUNK


def test_a_prompt_that_was_computed_and_is_refused_again_counts_again():
    rule, metrics, _ = slow_rule()
    for _ in range(2):
        assert not rule.admits(TIER, 3, prompt=b"one")
        assert not rule.admits(TIER, 5, prompt=b"another")
        rule.note_stored([b"its first chunk", b"one"])
    assert metrics.snapshot()[SKIPPED] == (2 * 3 + 5) * CHUNK


def test_the_prompts_that_are_remembered_are_bounded():
    rule, metrics, _ = slow_rule()
    for _ in range(3000):
        rule.admits(TIER, 1, prompt=next_prompt())
    assert len(rule._tiers[TIER].refused) == 1024
    assert metrics.snapshot()[SKIPPED] == 3000 * CHUNK


# --- what is shown ---


def rates(metrics):
    values = metrics.snapshot()
    return (
        values[f'kvkeep_expected_load_bytes_per_second{{tier="{TIER}"}}'],
        values[f'kvkeep_expected_load_start_seconds{{tier="{TIER}"}}'],
    )


def test_a_sound_line_is_shown():
    rule, metrics, _ = make()
    for count in (1, 2, 4, 8, 16):
        rule.note_load(TIER, count, 0.5 + 0.25 * count)
        rule.note_prefill(count * 100, 0.1 + count * 0.05)
    assert rates(metrics) == pytest.approx((4 << 20, 0.5), rel=1e-6)
    assert metrics.snapshot()["kvkeep_prefill_tokens_per_second"] == pytest.approx(2000)


@given(loads=st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 1.0)), min_size=1, max_size=60))
def test_no_rate_is_shown_that_noise_alone_would_make(loads):
    """It is the mean of all loads, unless their times rise with their sizes beyond doubt."""
    observed = Observed()
    for count, took in loads:
        observed = observed.plus(count, took)
    shown = observed.sound_line()
    mean = Line(0.0, observed.seconds / observed.units)
    assert shown in (mean, observed.line())
    if shown != mean:
        assert observed.weight > 2
    fastest = min(took / count for count, took in loads)
    slowest = max(took / count for count, took in loads)
    assert fastest * 0.999 <= mean.unit_s <= slowest * 1.001


def test_times_that_do_not_rise_with_the_size_show_their_mean():
    """A slope of next to nothing would be shown as a rate of terabytes."""
    rule, metrics, _ = make()
    for count, took in ((4, 0.2), (8, 0.200001), (16, 0.2), (4, 0.2), (8, 0.2), (16, 0.200002)):
        rule.note_load(TIER, count, took)
        rule.note_prefill(count * 100, took)
    rate, start_s = rates(metrics)
    assert start_s == 0.0
    assert 40 * (1 << 20) < rate < 60 * (1 << 20)
    assert 4000 < metrics.snapshot()["kvkeep_prefill_tokens_per_second"] < 6000
