"""Prefix arithmetic: masks, located runs and page runs, against the plain definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import MaskError
from kvkeep.prefix import LocatedRun, count_masked, locate_prefix, page_runs


@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 5), st.sampled_from("ltn"))
def test_masks_of_the_right_form_are_counted(num_false_chunks, num_true, chunk_size, kind):
    num_false = num_false_chunks * chunk_size
    values = [False] * num_false + [True] * num_true
    mask = {
        "l": values,
        "t": torch.tensor(values, dtype=torch.bool),
        "n": np.array(values, dtype=bool),
    }[kind]
    assert count_masked(mask, len(values), chunk_size) == num_false


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 4))
def test_every_other_mask_is_refused(values, chunk_size):
    num_false = values.count(False)
    good = values == [False] * num_false + [True] * (len(values) - num_false)
    if good and num_false % chunk_size == 0:
        assert count_masked(values, len(values), chunk_size) == num_false
    else:
        with pytest.raises(MaskError, match="mask"):
            count_masked(values, len(values), chunk_size)


def test_no_mask_excludes_nothing():
    assert count_masked(None, 7, 4) == 0


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True] * 3, "3 entries for 4 tokens"),
        ([], "mask"),
        ([1, 1, 1, 1], "bool"),
        (np.ones((2, 2), bool), r"shape \(2, 2\)"),
        ([True, False, True, True], "True at 0"),
        ([False, False, False, True], "3 tokens, no multiple of the chunk size 2"),
    ],
)
def test_refused_masks_say_what_is_wrong(mask, message):
    with pytest.raises(MaskError, match=message):
        count_masked(mask, 4, 2)


#: Which of up to three backends hold which of up to ten chunks.
holdings = st.integers(0, 10).flatmap(
    lambda num: st.lists(
        st.lists(st.booleans(), min_size=num, max_size=num), min_size=0, max_size=3
    ).map(lambda rows: (num, rows))
)


def asker(row: list[bool]):
    def ask(start: int) -> int:
        run = 0
        while start + run < len(row) and row[start + run]:
            run += 1
        return run

    return ask


@given(holdings)
def test_located_runs_cover_the_longest_prefix_that_anyone_holds(case):
    num_chunks, rows = case
    runs = locate_prefix(num_chunks, [(str(i), asker(row)) for i, row in enumerate(rows)])
    longest = 0
    while longest < num_chunks and any(row[longest] for row in rows):
        longest += 1
    assert (runs[-1].end if runs else 0) == longest
    position = 0
    for run in runs:
        assert run.start == position < run.end
        position = run.end
        assert all(rows[int(run.location)][run.start : run.end])
    for run, following in itertools.pairwise(runs):
        assert run.location != following.location


@given(holdings)
def test_a_run_starts_at_the_strongest_backend_that_holds_its_first_chunk(case):
    num_chunks, rows = case
    for run in locate_prefix(num_chunks, [(str(i), asker(row)) for i, row in enumerate(rows)]):
        assert not any(row[run.start] for row in rows[: int(run.location)])


def test_the_earlier_backend_is_asked_again_after_a_later_one():
    first = [True, False, True, False]
    second = [False, True, True, False]
    assert locate_prefix(4, [("a", asker(first)), ("b", asker(second))]) == [
        LocatedRun("a", 0, 1),
        LocatedRun("b", 1, 3),
    ]
    second[2] = False
    assert locate_prefix(4, [("a", asker(first)), ("b", asker(second))]) == [
        LocatedRun("a", 0, 1),
        LocatedRun("b", 1, 2),
        LocatedRun("a", 2, 3),
    ]


def test_a_backend_that_claims_more_than_was_asked_is_cut():
    assert locate_prefix(3, [("a", lambda start: 99)]) == [LocatedRun("a", 0, 3)]
    assert locate_prefix(3, []) == []
    assert locate_prefix(0, [("a", lambda start: 99)]) == []


@given(st.lists(st.integers(0, 20), max_size=30))
def test_page_runs_put_together_are_the_pages(pages):
    runs = page_runs(np.array(pages, dtype=np.int64))
    rebuilt = [page for _, first, count in runs for page in range(first, first + count)]
    assert rebuilt == pages
    assert [start for start, _, _ in runs] == [
        sum(count for _, _, count in runs[:index]) for index in range(len(runs))
    ]
    for (_, first, count), (_, following, _) in itertools.pairwise(runs):
        assert following != first + count
