"""From a slot mapping to the engine's pages: pure functions on numpy arrays, for any thread.

A slot is ``page * page_size + position in the page``. The tokens of a page are neighbours in it, so
one slot per page says everything; the others are checked against it. No Python loop per token or
per page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.gpu.base import SKIP_SLOT
from kvkeep.prefix import page_runs

Int64Array = npt.NDArray[np.int64]

#: Pages per run from which copying run by run beats one gather over all pages of a chunk.
MIN_PAGES_PER_RUN = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring pages of a chunk that move in one copy.

    Attributes:
        row: index of the first one inside the chunk.
        pages: their page numbers in the engine.
        is_run: the engine's pages are neighbours, too.
    """

    row: int
    pages: Int64Array
    is_run: bool


def slots_as_array(slot_mapping: torch.Tensor) -> Int64Array:
    """The slot mapping as int64 numpy array on the CPU.

    Raises:
        ValueError: it is no one-dimensional integer tensor.
    """
    if slot_mapping.ndim != 1 or slot_mapping.is_floating_point():
        raise ValueError(
            "the slot mapping must be a one-dimensional integer tensor, got "
            f"{slot_mapping.dtype} of shape {tuple(slot_mapping.shape)}"
        )
    array: Int64Array = slot_mapping.detach().to("cpu", torch.int64).numpy()
    return array


def slots_of(slots: Int64Array, start: int, end: int, offset: int) -> Int64Array:
    """The slots of tokens ``start`` to ``end``.

    Raises:
        ValueError: one has no slot; the first such token is named.
    """
    if start < offset:
        raise ValueError(f"token {start} has no slot: the slot mapping starts at token {offset}")
    if end - offset > len(slots):
        first = max(start, offset + len(slots))
        raise ValueError(
            f"token {first} has no slot: the slot mapping ends at token {offset + len(slots)}"
        )
    return slots[start - offset : end - offset]


@dataclass(frozen=True, slots=True)
class PageRules:
    """What a valid slot is.

    Attributes:
        page_size: tokens in a page.
        num_pages: pages in the engine's caches.
        allow_skip: SKIP_SLOT is allowed, for whole pages.
    """

    page_size: int
    num_pages: int
    allow_skip: bool


def chunk_pages(
    starts: Sequence[int],
    ends: Sequence[int],
    slots: Int64Array,
    offset: int,
    rules: PageRules,
) -> list[Int64Array]:
    """The pages of each chunk; SKIP_SLOT where a page is not to be written.

    Args:
        starts: first token of each chunk.
        ends: token after the last of each chunk. A last page may be filled in part.
        slots: slot of each token from ``offset`` on.
        offset: leading tokens that ``slots`` leaves out.
        rules: what a valid slot is.

    Raises:
        ValueError: a slot is missing, negative or too large, or the tokens of a page are not
            neighbours in it; the first such token is named.
    """
    size = rules.page_size
    result: list[Int64Array] = []
    first = 0
    while first < len(starts):
        last = first + 1  # chunks first..last are one span of whole pages
        while (
            last < len(starts)
            and starts[last] == ends[last - 1]
            and (starts[last] - starts[first]) % size == 0
        ):
            last += 1
        base = starts[first]
        pages = _span_pages(slots_of(slots, base, ends[last - 1], offset), base, rules)
        for start, end in zip(starts[first:last], ends[first:last], strict=True):
            result.append(pages[(start - base) // size : -((base - end) // size)])
        first = last
    return result


def _span_pages(slots: Int64Array, start: int, rules: PageRules) -> Int64Array:
    """Pages of consecutive tokens, the first of which begins a page."""
    size = rules.page_size
    heads = slots[::size]
    written = heads >= 0
    expected = heads[:, None] + written[:, None] * np.arange(size, dtype=np.int64)
    wrong = slots != expected.reshape(-1)[: len(slots)]
    pages = np.where(written, heads // size, SKIP_SLOT)
    bad_heads = (written & (heads % size != 0)) | (pages >= rules.num_pages)
    bad_heads |= heads < (SKIP_SLOT if rules.allow_skip else 0)
    wrong[::size] |= bad_heads
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"token {start + at} has slot {int(slots[at])}, its page's first token "
            f"{start + at - at % size} has slot {int(slots[at - at % size])}: a page of {size} "
            f"tokens must start at a multiple of {size} below {rules.num_pages * size} and hold "
            "its tokens side by side"
        )
    return pages


def segments_of(pages: Int64Array) -> list[Segment]:
    """How the pages of one chunk move: pages that are skipped are left out.

    One segment per run of neighbours where runs are long, else one per stretch between skipped
    pages.
    """
    if len(pages) == 0:
        return []
    if pages.min() >= 0:
        return _stretch(0, pages)
    found: list[Segment] = []
    for _, first, count in page_runs(np.flatnonzero(pages >= 0)):
        found += _stretch(first, pages[first : first + count])
    return found


def _stretch(row: int, pages: Int64Array) -> list[Segment]:
    """Segments of pages none of which is skipped."""
    breaks = int(np.count_nonzero(np.diff(pages) != 1))
    if breaks and (breaks + 1) * MIN_PAGES_PER_RUN > len(pages):
        return [Segment(row, pages, is_run=False)]
    return [
        Segment(row + at, pages[at : at + count], is_run=True) for at, _, count in page_runs(pages)
    ]
