"""HostTransfer: the copies of one call between caches and chunks that are both in CPU memory.

Made by the connectors, once per call; its parts may be copied from several threads at once, and the
interpreter's lock is free while bytes move. Two ways to the same bytes: the compiled one
(``native_transfer.py``), and numpy's here, where an installation has no compiled one. numpy gathers
and scatters whole rows at the speed of ``memmove``, where the index operations of torch reach a
tenth to a half of it on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeep.gpu.slots import Int64Array, Segment, segments_of

ByteArray = npt.NDArray[np.uint8]
#: The tensors of each layer as bytes: [rows, bytes of a row], or [rows, pieces, bytes of a piece]
#: where the pieces of a row are apart (heads of dense caches).
HostLayers = Sequence[tuple[ByteArray, ...]]


class HostTransfer(ABC):
    """Which rows of which caches belong to which part of which chunk, and the copies of them."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of chunks."""

    @property
    @abstractmethod
    def layer_bytes(self) -> int:
        """Bytes of all chunks in one layer."""

    @abstractmethod
    def copy(self, layers: range, chunks: range) -> None:
        """Copy some layers of some chunks; complete on return."""


@dataclass(frozen=True, slots=True)
class HostTask:
    """What a transfer has to do.

    Attributes:
        layers: the caches, all with the same rows.
        step: rows from a page to the next one.
        pages: numbers of each chunk's pages, negative where a page does not move; the others are
            known to be in the caches.
        chunks: uint8 [layers, tensors of a layer, pages, *row] each, contiguous.
        to_engine: the direction.
    """

    layers: HostLayers
    step: int
    pages: Sequence[Int64Array]
    chunks: Sequence[ByteArray]
    to_engine: bool


@dataclass(frozen=True, slots=True)
class Move:
    """Pages of one chunk that move in one call, the same in every layer.

    Attributes:
        rows: the engine's rows: a slice where they are neighbours, else their numbers.
        part: the chunk's pages.
    """

    rows: Int64Array | slice
    part: slice


class NumpyTransfer(HostTransfer):
    """Copies with numpy: one call per chunk, or per run of neighbouring pages, and layer."""

    def __init__(self, task: HostTask) -> None:
        """Plan the copies."""
        self._task = task
        self._moves = [moves_of(segments_of(pages), task.step) for pages in task.pages]

    def __len__(self) -> int:
        """See :class:`HostTransfer`."""
        return len(self._moves)

    @property
    def layer_bytes(self) -> int:
        """See :class:`HostTransfer`."""
        return layer_bytes_of(self._task)

    def copy(self, layers: range, chunks: range) -> None:
        """See :meth:`HostTransfer.copy`."""
        copy = scatter if self._task.to_engine else gather
        for layer in layers:
            for part, rows in enumerate(self._task.layers[layer]):
                for number in chunks:
                    copy(rows, self._moves[number], self._task.chunks[number][layer, part])


def layer_bytes_of(task: HostTask) -> int:
    """Bytes of all chunks of a transfer in one layer."""
    return sum(chunk.nbytes for chunk in task.chunks) // max(1, len(task.layers))


def moves_of(segments: Sequence[Segment], step: int) -> list[Move]:
    """What the segments of one chunk mean on rows.

    Args:
        segments: which pages go where.
        step: rows from a page to the next one.
    """
    moves: list[Move] = []
    for segment in segments:
        count = len(segment.pages)
        part = slice(segment.row, segment.row + count)
        if segment.is_run:
            first = int(segment.pages[0]) * step
            moves.append(Move(slice(first, first + (count - 1) * step + 1, step), part))
        else:
            moves.append(Move(segment.pages * step if step > 1 else segment.pages, part))
    return moves


def gather(rows: ByteArray, moves: list[Move], chunk: ByteArray) -> None:
    """Copy pages of one layer into its part of a chunk.

    Args:
        rows: uint8 [rows, *row], the engine's pages of this layer.
        moves: which rows go where.
        chunk: uint8 [pages, *row], contiguous: this layer's part of the chunk.
    """
    for move in moves:
        target = chunk[move.part]
        if isinstance(move.rows, slice):
            target[...] = rows[move.rows]
        elif rows.flags.c_contiguous:
            # with mode="clip" numpy writes into a contiguous `out` directly, without a buffer
            rows.take(move.rows, axis=0, out=target, mode="clip")
        else:
            target[...] = rows[move.rows]


def scatter(rows: ByteArray, moves: list[Move], chunk: ByteArray) -> None:
    """Copy one layer's part of a chunk into the engine's pages; the arguments of :func:`gather`."""
    for move in moves:
        rows[move.rows] = chunk[move.part]
