"""PageViews: the pages of an engine's KV caches as rows of bytes.

Made once per registered set of caches, by the connectors; immutable, so usable from any thread. A
page must be one contiguous run of bytes, whatever the order of its dimensions in memory: it is
never interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvkeep.errors import LayoutError
from kvkeep.layout import KVLayout


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
