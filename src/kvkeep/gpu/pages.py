"""From a slot mapping to the engine's pages: pure functions on numpy arrays, for any thread.

A slot is ``page * page_size + position in the page``. The tokens of a page are neighbours in it, so
one slot per page says everything; the others are checked against it. No Python loop per token or
per page.

PageViews: the pages of an engine's KV caches as rows of bytes.

Made once per registered set of caches, by the connectors; immutable, so usable from any thread. A
page must be one contiguous run of bytes, whatever the order of its dimensions in memory: it is
never interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.errors import LayoutError
from kvkeep.gpu.base import SKIP_SLOT
from kvkeep.layout import KVLayout
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


@dataclass(frozen=True, slots=True)
class PageViews:
    """Rows of bytes, one tensor per layer.

    Attributes:
        rows: uint8 [rows, page bytes] per layer, a view of the engine's memory. Page ``p`` is row
            ``p * step``: caches that share one storage are seen as rows of the whole storage.
        step: rows from a page to the next one.
        num_pages: pages in each layer.
        page_bytes: bytes of one page of one layer.
        device: where the caches are.
    """

    rows: tuple[torch.Tensor, ...]
    step: int
    num_pages: int
    page_bytes: int
    device: torch.device


def describe(tensor: torch.Tensor) -> str:
    """Shape, stride, dtype and device of a tensor, for error messages."""
    return (
        f"shape {tuple(tensor.shape)}, stride {tuple(tensor.stride())}, "
        f"{tensor.dtype} on {tensor.device}"
    )


def view_pages(layout: KVLayout, kvcaches: Sequence[torch.Tensor]) -> PageViews:
    """See caches as rows of bytes.

    Args:
        layout: the declared layout; one group of layers.
        kvcaches: one tensor per layer whose dimension 0 is the page.

    Raises:
        LayoutError: the tensors do not have the declared layout; prints both.
    """
    if len(kvcaches) != layout.num_layers:
        raise LayoutError(f"{len(kvcaches)} KV caches for {layout.num_layers} layers of {layout}")
    page_bytes = layout.groups[0].layer_page_bytes
    first = kvcaches[0]
    strides = [_check_layer(layout, layer, tensor) for layer, tensor in enumerate(kvcaches)]
    for layer, tensor in enumerate(kvcaches):
        same = (len(tensor), strides[layer], tensor.device) == (
            len(first),
            strides[0],
            first.device,
        )
        if not same:
            raise LayoutError(
                f"layer {layer} has {describe(tensor)}, layer 0 has {describe(first)}: all layers "
                f"of a group must have the same number and distance of pages ({layout})"
            )
    step, rest = divmod(strides[0], page_bytes)
    if rest:  # padded pages: rows at a distance of their own
        step, row_stride = 1, strides[0]
    else:
        row_stride = page_bytes
    count = (len(first) - 1) * step + 1
    rows = tuple(_rows(tensor, count, page_bytes, row_stride) for tensor in kvcaches)
    return PageViews(rows, step, len(first), page_bytes, first.device)


def _check_layer(layout: KVLayout, layer: int, tensor: torch.Tensor) -> int:
    """Bytes from one page to the next."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim < 1 or tensor.numel() == 0:
        raise LayoutError(
            f"layer {layer} is no tensor of pages but {type(tensor).__name__}; declared: {layout}"
        )
    expected = 1
    dims = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True))
    for stride, size in dims:
        if size == 1:
            continue
        if stride != expected:
            raise LayoutError(
                f"layer {layer}: a page is not one contiguous run of bytes in {describe(tensor)}; "
                f"declared: {layout}"
            )
        expected *= size
    page_bytes = layout.groups[0].layer_page_bytes
    actual = expected * tensor.element_size()
    if actual != page_bytes:
        raise LayoutError(
            f"layer {layer}: a page of {describe(tensor)} has {actual} bytes, "
            f"declared are {page_bytes}: {layout}"
        )
    if len(tensor) == 1:
        return page_bytes
    distance = tensor.stride(0) * tensor.element_size()
    if distance < page_bytes:
        raise LayoutError(f"layer {layer}: pages overlap in {describe(tensor)}; declared: {layout}")
    return distance


def _rows(tensor: torch.Tensor, count: int, page_bytes: int, row_stride: int) -> torch.Tensor:
    """uint8 [count, page bytes] over the storage of ``tensor`` from its first byte on."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), start, (count, page_bytes), (row_stride, 1))
