"""Copies between pages on a torch device and chunks in CPU memory.

On CUDA: pages are gathered into a staging buffer on the device and leave it in large pieces, on a
stream of their own that waits for the caller's stream; the end is an event, never the whole device.
The pool is pinned where CUDA is (``memory/arena.py``), so the pieces are asynchronous transfers.
Page numbers travel to the device once per transfer, and the host waits once, after its last piece:
a batch uses the staging buffer after the batch before it, by the order of the stream.
On other devices the same calls run in order. Callable from any thread; a lock keeps the staging
buffer to one caller.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from kvkeep.gpu.host_copy import ByteArray
from kvkeep.gpu.pages import Int64Array, Segment

#: Bytes of the staging buffer on the device, unless a page is larger.
STAGING_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of the staging buffer, and the pages of a chunk that they are.

    Attributes:
        chunk: number of the chunk.
        first: its first page.
        count: how many.
    """

    chunk: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pages that are in the staging buffer together.

    Attributes:
        index: rows of the pages, int64 on the device.
        pieces: where consecutive rows of the buffer belong.
    """

    index: torch.Tensor
    pieces: list[_Piece]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One transfer: the same pages in every layer. Made by :meth:`DeviceCopier.plan`."""

    batches: list[_Batch]
    chunks: Sequence[ByteArray]


class DeviceCopier:
    """Moves pages of one device through a staging buffer."""

    def __init__(self, device: torch.device, *, staging_bytes: int = STAGING_BYTES) -> None:
        """Nothing is allocated before the first copy.

        Args:
            device: where the caches are.
            staging_bytes: size of the buffer; a larger page makes it larger.
        """
        self.device = device
        self._staging_bytes = staging_bytes
        self._lock = threading.Lock()
        self._staging: torch.Tensor | None = None  # guarded by _lock
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def caller_stream(self) -> torch.cuda.Stream | None:
        """The stream on which the calling thread's KV is written or read; None without CUDA."""
        return torch.cuda.current_stream(self.device) if self._stream is not None else None

    def plan(
        self, segments: Sequence[list[Segment]], chunks: Sequence[ByteArray], step: int
    ) -> CopyPlan:
        """Cut a transfer into batches that fit the staging buffer.

        Args:
            segments: which pages of the engine go where, per chunk.
            chunks: uint8 [layers, pages, page bytes] each, all of one page size.
            step: rows of the engine from a page to the next one.
        """
        if not chunks:
            return CopyPlan([], chunks)
        capacity = max(1, self._staging_bytes // chunks[0].shape[2])
        cut: list[tuple[list[Int64Array], list[_Piece]]] = []
        room = 0
        for number, some in enumerate(segments):
            for segment in some:
                taken = 0
                while taken < len(segment.pages):
                    if room == 0:
                        cut.append(([], []))
                        room = capacity
                    count = min(room, len(segment.pages) - taken)
                    pages, pieces = cut[-1]
                    pages.append(segment.pages[taken : taken + count] * step)
                    pieces.append(_Piece(number, segment.row + taken, count))
                    taken += count
                    room -= count
        batches = [
            _Batch(torch.from_numpy(np.concatenate(pages)).to(self.device), pieces)
            for pages, pieces in cut
        ]
        return CopyPlan(batches, chunks)

    def gather(
        self,
        rows: Sequence[torch.Tensor],
        layers: range,
        plan: CopyPlan,
        after: torch.cuda.Stream | None,
    ) -> None:
        """Copy the pages of some layers into their chunks; complete on return.

        Args:
            rows: uint8 [rows, page bytes] on the device, per layer of the engine.
            layers: which of them.
            plan: what goes where.
            after: what this stream has been given so far comes first.
        """
        # inference mode: the staging buffer serves callers in and out of it
        with self._lock, torch.inference_mode(), self._on_stream(after):
            for layer in layers:
                for batch in plan.batches:
                    staging = self._staging_rows(len(batch.index), rows[layer].shape[1])
                    torch.index_select(_wide(rows[layer]), 0, batch.index, out=_wide(staging))
                    for target, source in _pairs(plan, batch, layer, staging):
                        target.copy_(source, non_blocking=True)
            self._finish()

    def scatter(
        self,
        rows: Sequence[torch.Tensor],
        layers: range,
        plan: CopyPlan,
        after: torch.cuda.Stream | None,
    ) -> None:
        """Copy some layers of chunks into their pages; the arguments of :meth:`gather`."""
        # inference mode: the staging buffer serves callers in and out of it
        with self._lock, torch.inference_mode(), self._on_stream(after):
            for layer in layers:
                for batch in plan.batches:
                    staging = self._staging_rows(len(batch.index), rows[layer].shape[1])
                    for source, target in _pairs(plan, batch, layer, staging):
                        target.copy_(source, non_blocking=True)
                    _wide(rows[layer]).index_copy_(0, batch.index, _wide(staging))
            self._finish()

    def _on_stream(
        self, after: torch.cuda.Stream | None
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        if self._stream is None:
            return nullcontext()
        if after is not None:
            self._stream.wait_stream(after)
        return torch.cuda.stream(self._stream)

    def _finish(self) -> None:
        if self._stream is not None:
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(self._stream)
            end.synchronize()

    def _staging_rows(self, count: int, page_bytes: int) -> torch.Tensor:
        size = max(self._staging_bytes, page_bytes)
        if self._staging is None or self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._staging[: count * page_bytes].view(count, page_bytes)


def _pairs(
    plan: CopyPlan, batch: _Batch, layer: int, staging: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(part of a chunk, rows of the staging buffer) of each piece."""
    pairs = []
    row = 0
    for piece in batch.pieces:
        part = plan.chunks[piece.chunk][layer, piece.first : piece.first + piece.count]
        pairs.append((torch.from_numpy(part), staging[row : row + piece.count]))
        row += piece.count
    return pairs


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as int64 where that is possible: index operations move whole elements."""
    if rows.shape[1] % 8 or rows.storage_offset() % 8 or rows.stride(0) % 8:
        return rows
    return rows.view(torch.int64)
