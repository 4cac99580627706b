from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.gpu.pages import PageRules, chunk_pages, segments_of, slots_as_array, slots_of

RULES = PageRules(page_size=4, num_pages=10, allow_skip=False)
SKIPPING = PageRules(page_size=4, num_pages=10, allow_skip=True)


def slots_for(pages: list[int], size: int = 4) -> np.ndarray:
    return np.concatenate(
        [np.full(size, -1) if p < 0 else np.arange(p * size, (p + 1) * size) for p in pages]
    )


def test_pages_of_chunks_in_any_order() -> None:
    slots = slots_for([7, 2, 3, 9, 0, 1])
    found = chunk_pages([0, 8, 16], [8, 16, 24], slots, 0, RULES)
    assert [pages.tolist() for pages in found] == [[7, 2], [3, 9], [0, 1]]


def test_chunks_with_a_gap_and_an_offset() -> None:
    slots = slots_for([3, 9, 0, 1])
    found = chunk_pages([8, 20], [16, 24], slots, 8, RULES)
    assert [pages.tolist() for pages in found] == [[3, 9], [1]]


def test_last_page_filled_in_part() -> None:
    found = chunk_pages([0, 8], [8, 11], slots_for([5, 6, 2])[:11], 0, RULES)
    assert [pages.tolist() for pages in found] == [[5, 6], [2]]


def test_whole_pages_may_be_skipped() -> None:
    found = chunk_pages([0], [12], slots_for([-1, 4, -1]), 0, SKIPPING)
    assert found[0].tolist() == [-1, 4, -1]


@pytest.mark.parametrize(
    ("slots", "token"),
    [
        (np.array([4, 5, 6, 7, 8, 9, 11, 10]), 6),  # tokens of a page change places
        (np.array([4, 5, 6, 7, 9, 10, 11, 12]), 4),  # begins inside of a page
        (np.array([4, 5, 6, 7, -1, -1, -1, -1]), 4),  # skipped where nothing may be
        (np.array([4, 5, 6, 7, 40, 41, 42, 43]), 4),  # a page that the engine does not have
        (np.array([4, 5, 6, 7, -2, -2, -2, -2]), 4),
    ],
)
def test_a_wrong_slot_names_the_first_bad_token(slots: np.ndarray, token: int) -> None:
    with pytest.raises(ValueError, match=f"^token {token} has slot"):
        chunk_pages([0], [8], slots, 0, RULES)


def test_a_page_is_skipped_whole_or_not_at_all() -> None:
    with pytest.raises(ValueError, match=r"^token 1 has slot"):
        chunk_pages([0], [4], np.array([-1, 5, 6, 7]), 0, SKIPPING)
    with pytest.raises(ValueError, match=r"^token 3 has slot -1"):
        chunk_pages([0], [4], np.array([4, 5, 6, -1]), 0, SKIPPING)


def test_a_token_without_slot_is_named() -> None:
    slots = np.arange(8)
    with pytest.raises(ValueError, match="token 12 has no slot"):
        slots_of(slots, 8, 16, 4)
    with pytest.raises(ValueError, match="token 0 has no slot"):
        slots_of(slots, 0, 4, 4)


def test_slot_mapping_must_be_flat_integers() -> None:
    assert slots_as_array(torch.tensor([3, 4], dtype=torch.int32)).dtype == np.int64
    for wrong in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2)):
        with pytest.raises(ValueError, match="one-dimensional integer"):
            slots_as_array(wrong)


@given(st.lists(st.integers(-1, 40), max_size=40, unique_by=lambda p: p if p >= 0 else object()))
def test_segments_cover_every_page_that_is_not_skipped_once(numbers: list[int]) -> None:
    pages = np.array(numbers, np.int64)
    seen = np.full(len(pages), -1)
    for segment in segments_of(pages):
        rows = slice(segment.row, segment.row + len(segment.pages))
        assert (seen[rows] == -1).all()
        seen[rows] = segment.pages
        if segment.is_run:
            assert (np.diff(segment.pages) == 1).all()
    assert seen.tolist() == numbers


def test_long_runs_are_copied_as_runs() -> None:
    pages = np.concatenate([np.arange(30, 50), np.arange(0, 20)])
    assert [(s.row, s.is_run) for s in segments_of(pages)] == [(0, True), (20, True)]
    shuffled = np.array([5, 1, 2, 9])
    assert [(s.row, s.is_run) for s in segments_of(shuffled)] == [(0, False)]
