"""Copies between pages on a torch device and chunks in CPU memory.

On CUDA: pages are gathered into a staging buffer on the device and leave it in large pieces, on a
stream of their own that waits for the caller's stream; the end is an event, never the whole device.
The pool is pinned where CUDA is (``memory/pinned.py``), so the pieces are asynchronous transfers.
On other devices the same calls run in order. Callable from any thread; a lock keeps the staging
buffer to one caller.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from kvkeep.gpu.host import ByteArray
from kvkeep.gpu.slots import Segment

#: Bytes of the staging buffer on the device, unless a page is larger.
STAGING_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pages that are in the staging buffer together.

    Attributes:
        index: rows of the pages, int64 on the device.
        pieces: where consecutive rows of the buffer belong: uint8 [pages, page bytes] each, parts
            of chunks.
    """

    index: torch.Tensor
    pieces: list[ByteArray]


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

    def gather(
        self,
        rows: torch.Tensor,
        step: int,
        parts: Sequence[tuple[list[Segment], ByteArray]],
        after: torch.cuda.Stream | None,
    ) -> None:
        """Copy pages of one layer into their parts of chunks; complete on return.

        Args:
            rows: uint8 [rows, page bytes] on the device.
            step: rows from a page to the next one.
            parts: (which pages, uint8 [pages, page bytes] of the chunk) per chunk.
            after: what this stream has been given so far comes first.
        """
        # inference mode: the staging buffer serves callers in and out of it
        with self._lock, torch.inference_mode(), self._on_stream(after):
            for batch in self._batches(rows, step, parts):
                staging = self._staging_rows(len(batch.index), rows.shape[1])
                torch.index_select(_wide(rows), 0, batch.index, out=_wide(staging))
                first = 0
                for piece in batch.pieces:
                    source = staging[first : first + len(piece)]
                    torch.from_numpy(piece).copy_(source, non_blocking=True)
                    first += len(piece)
            self._finish()

    def scatter(
        self,
        rows: torch.Tensor,
        step: int,
        parts: Sequence[tuple[list[Segment], ByteArray]],
        after: torch.cuda.Stream | None,
    ) -> None:
        """Copy parts of chunks into pages of one layer; the arguments of :meth:`gather`."""
        # inference mode: the staging buffer serves callers in and out of it
        with self._lock, torch.inference_mode(), self._on_stream(after):
            for batch in self._batches(rows, step, parts):
                staging = self._staging_rows(len(batch.index), rows.shape[1])
                first = 0
                for piece in batch.pieces:
                    target = staging[first : first + len(piece)]
                    target.copy_(torch.from_numpy(piece), non_blocking=True)
                    first += len(piece)
                _wide(rows).index_copy_(0, batch.index, _wide(staging))
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

    def _batches(
        self, rows: torch.Tensor, step: int, parts: Sequence[tuple[list[Segment], ByteArray]]
    ) -> Iterator[_Batch]:
        """Cut the segments into batches that fit the staging buffer."""
        capacity = max(1, self._staging_bytes // rows.shape[1])
        pages: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
        pieces: list[ByteArray] = []
        room = capacity
        for segments, chunk in parts:
            for segment in segments:
                taken = 0
                while taken < len(segment.pages):
                    count = min(room, len(segment.pages) - taken)
                    first = segment.row + taken
                    pages.append(segment.pages[taken : taken + count])
                    pieces.append(chunk[first : first + count])
                    taken += count
                    room -= count
                    if room == 0:
                        yield self._batch(pages, pieces, step)
                        pages, pieces, room = [], [], capacity
        if pieces:
            yield self._batch(pages, pieces, step)

    def _batch(
        self,
        pages: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]],
        pieces: list[ByteArray],
        step: int,
    ) -> _Batch:
        index = torch.from_numpy(np.concatenate(pages) * step)
        return _Batch(index.to(self.device), pieces)


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as int64 where that is possible: index operations move whole elements."""
    if rows.shape[1] % 8 or rows.storage_offset() % 8 or rows.stride(0) % 8:
        return rows
    return rows.view(torch.int64)
