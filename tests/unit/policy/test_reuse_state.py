"""What the policy knows of a chunk survives being packed into a number."""

import gc

import hypothesis.strategies as st
from hypothesis import given

from kvkeep.policy.reuse import (
    HAS_NEXT,
    NUM_CLASSES,
    PARTS,
    ReusePolicy,
    class_of,
    epoch_of,
    history_after_use,
    least_state,
    new_state,
    queue_number,
    queue_of,
    used_state,
    uses_of,
)
from kvkeep.testing.policies import PolicyRun

EPOCHS = st.integers(0, 1 << 40)
CLASSES = st.integers(0, NUM_CLASSES - 1)


@given(EPOCHS, CLASSES)
def test_a_new_chunk(epoch, chunk_class):
    state = new_state(queue_number(epoch, chunk_class))
    assert epoch_of(queue_of(state)) == epoch
    assert class_of(queue_of(state)) == chunk_class
    assert uses_of(state) == 1


@given(st.lists(st.tuples(st.integers(0, 3000), CLASSES), min_size=1, max_size=20))
def test_uses_and_intervals(steps):
    """As with numbers of their own, but for the last part of an interval."""
    epoch, uses, interval = 5, 1, 0.0
    state = new_state(queue_number(epoch, 0))
    for age, chunk_class in steps:
        epoch, uses = epoch + age, uses + 1
        interval = float(age) if uses == 2 else (interval + age) / 2
        seen_uses, seen_interval = history_after_use(state, age)
        state = used_state(queue_number(epoch, chunk_class), seen_uses, seen_interval)
        assert seen_uses == uses_of(state) == min(uses, 7)
        assert abs(seen_interval / PARTS - interval) < 1 / 1000
        assert (epoch_of(queue_of(state)), class_of(queue_of(state))) == (epoch, chunk_class)


def test_an_endless_interval_leaves_the_queue_alone():
    queue = queue_number(1 << 33, NUM_CLASSES - 1)
    state = used_state(queue, *history_after_use(new_state(queue), 1 << 40))
    assert queue_of(state) == queue
    assert uses_of(state) == 2


@given(EPOCHS, CLASSES, st.integers(1, 7), st.integers(0, (1 << 24) - 1))
def test_a_successor_changes_nothing_else(epoch, chunk_class, uses, interval):
    state = used_state(queue_number(epoch, chunk_class), uses, interval)
    assert not state & HAS_NEXT
    with_next = state | HAS_NEXT
    assert queue_of(with_next) == queue_of(state)
    assert uses_of(with_next) == uses
    assert history_after_use(with_next, 3) == history_after_use(state, 3)


@given(EPOCHS, CLASSES, st.integers(1, 7))
def test_what_was_used_in_an_epoch_is_not_less_than_its_least(epoch, chunk_class, uses):
    state = used_state(queue_number(epoch, chunk_class), uses, 5)
    for one in (state, state | HAS_NEXT):
        assert least_state(epoch) <= one < least_state(epoch + 1)


def test_older_queues_are_less():
    assert queue_number(1, NUM_CLASSES - 1) < queue_number(2, 0) < queue_number(2, 1)


def test_the_garbage_collector_sees_no_object_per_chunk():
    """A full collection would pause the engine for as long as it takes to visit them."""
    gc.collect()
    before = len(gc.get_objects())
    run = PolicyRun(ReusePolicy())
    for number in range(4000):
        run.put(number)
        if number >= 2000:
            run.evict(*run.candidates(1))
    gc.collect()
    assert len(run.policy._gone) == 2000
    assert len(gc.get_objects()) - before < 500
