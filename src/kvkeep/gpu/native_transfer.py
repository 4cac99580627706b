"""NativeTransfer: a HostTransfer whose copies are compiled code, one call per layer and tensor.

What leaves this module are addresses, so it checks again that every row lies in its cache or chunk.
Made by the connectors, once per call; parts may be copied from several threads at once. The arrays
that the addresses point into are held until the transfer is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvkeep.gpu.host import ByteArray, HostTask, HostTransfer, NumpyTransfer, layer_bytes_of
from kvkeep.gpu.native import Addresses, How, Pieces, RowCopier, load_rows
from kvkeep.gpu.slots import Int64Array

#: A transfer of fewer bytes is left in the cache, for whoever reads it next; streaming a larger one
#: is faster, and leaves the engine's own data in the cache.
STREAM_BYTES = 4 << 20
#: Shorter rows are streamed only if they consist of whole lines of the cache.
SHORT_ROW_BYTES = 1 << 10
LINE_BYTES = 64
#: Rows of this size on are worth reading four at a time also where they follow each other.
FOUR_ROW_BYTES = 8 << 10


def plan_transfer(task: HostTask, *, native: bool) -> HostTransfer:
    """Plan a transfer.

    Args:
        task: what is to be copied.
        native: with compiled code, where the installation has it; else with numpy.

    Raises:
        ValueError: a page is outside the caches, or the chunks do not have the caches' form.
    """
    copier = load_rows() if native else None
    return NumpyTransfer(task) if copier is None else NativeTransfer(task, copier)


def choose_how(num_bytes: int, pieces: Pieces, *, to_engine: bool) -> How:
    """How to copy rows (docs/performance.md has the measurements).

    Args:
        num_bytes: of the whole transfer.
        pieces: what a row consists of.
        to_engine: rows are read one after the other, and written wherever they belong.
    """
    size = pieces.num_bytes
    if num_bytes < STREAM_BYTES or (size < SHORT_ROW_BYTES and size % LINE_BYTES):
        return How.PLAIN
    if to_engine and pieces.count == 1 and size < FOUR_ROW_BYTES:
        return How.STREAM
    return How.STREAM_FOUR


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that move, of all chunks one after the other.

    Attributes:
        pages: their numbers in the engine.
        addresses: where they are in their chunks, in the first tensor of the first layer.
        layer_steps: bytes from there to the same row of the next layer.
        tensor_steps: the same of the next tensor of the layer.
        bounds: where the rows of each chunk begin, and the last ones end.
    """

    pages: Int64Array
    addresses: Addresses
    layer_steps: Int64Array
    tensor_steps: Int64Array
    bounds: list[int]


class NativeTransfer(HostTransfer):
    """Copies with compiled code."""

    def __init__(self, task: HostTask, copier: RowCopier) -> None:
        """Compute all addresses that do not depend on the layer.

        Raises:
            ValueError: a page is outside the caches, or the chunks do not have the caches' form.
        """
        self._task = task
        self._copier = copier
        shape = task.layers[0][0].shape[1:]
        arrays = [array for layer in task.layers for array in layer]
        for array in arrays:
            if array.shape[1:] != shape or array.strides[-1] != 1:
                raise ValueError(f"rows of {array.shape} with strides {array.strides}: {shape}")
        self._rows = _rows_of(task.pages, [_checked(task, chunk, shape) for chunk in task.chunks])
        num_rows = min(len(array) for array in arrays)
        if len(self._rows.pages) and int(self._rows.pages.max()) * task.step >= num_rows:
            raise ValueError(f"page {self._rows.pages.max()} is not in caches of {num_rows} rows")
        strides = {array.strides[0] for array in arrays}
        self._offsets = {stride: self._rows.pages * (task.step * stride) for stride in strides}
        self._num_bytes = len(self._rows.pages) * int(np.prod(shape)) * len(arrays)

    def __len__(self) -> int:
        """See :class:`HostTransfer`."""
        return len(self._task.chunks)

    @property
    def layer_bytes(self) -> int:
        """See :class:`HostTransfer`."""
        return layer_bytes_of(self._task)

    def copy(self, layers: range, chunks: range) -> None:
        """See :meth:`HostTransfer.copy`."""
        rows = self._rows
        some = slice(rows.bounds[chunks.start], rows.bounds[chunks.stop])
        first, layer_steps = rows.addresses[some], rows.layer_steps[some]
        tensor_steps = rows.tensor_steps[some]
        to_engine = self._task.to_engine
        for layer in layers:
            for number, array in enumerate(self._task.layers[layer]):
                inside = first + layer * layer_steps + number * tensor_steps
                engine = _address(array) + self._offsets[array.strides[0]][some]
                pieces = _pieces_of(array, to_engine=to_engine)
                how = choose_how(self._num_bytes, pieces, to_engine=to_engine)
                if to_engine:
                    self._copier.copy(engine, inside, pieces, how)
                else:
                    self._copier.copy(inside, engine, pieces, how)


def _checked(task: HostTask, chunk: ByteArray, shape: tuple[int, ...]) -> ByteArray:
    tensors = len(task.layers[0])
    if (
        chunk.shape[:2] != (len(task.layers), tensors)
        or chunk.shape[3:] != shape
        or not (chunk.flags.c_contiguous and chunk.flags.writeable)
    ):
        raise ValueError(
            f"a chunk of shape {chunk.shape} for {len(task.layers)} layers of {tensors} tensors "
            f"with rows of {shape}"
        )
    return chunk


def _rows_of(pages: Sequence[Int64Array], chunks: Sequence[ByteArray]) -> _Rows:
    """The rows that move."""
    counts = [len(some) for some in pages]
    if counts != [chunk.shape[2] for chunk in chunks]:
        raise ValueError(f"{counts} pages for chunks of {[chunk.shape[2] for chunk in chunks]}")
    if not counts:
        nothing = np.empty(0, np.int64)
        return _Rows(nothing, nothing, nothing, nothing, [0])
    numbers = np.concatenate(pages)
    firsts = np.cumsum([0, *counts])
    inside = np.arange(len(numbers)) - np.repeat(firsts[:-1], counts)
    steps = np.array([chunk.strides[:3] for chunk in chunks], np.int64)
    layer_steps, tensor_steps, row_steps = (np.repeat(column, counts) for column in steps.T)
    bases = np.repeat(np.array([_address(chunk) for chunk in chunks], np.int64), counts)
    addresses = bases + inside * row_steps
    moves = numbers >= 0
    bounds = firsts.tolist()
    if not moves.all():
        bounds = np.concatenate([[0], np.cumsum(moves)])[firsts].tolist()
        numbers, addresses = numbers[moves], addresses[moves]
        layer_steps, tensor_steps = layer_steps[moves], tensor_steps[moves]
    return _Rows(numbers, addresses, layer_steps, tensor_steps, bounds)


def _pieces_of(array: ByteArray, *, to_engine: bool) -> Pieces:
    """What a row of a cache consists of; in a chunk its pieces are neighbours."""
    size = array.shape[-1]
    if array.ndim == 2:
        return Pieces(1, size, size, size)
    there = array.strides[1]
    return Pieces(array.shape[1], size, *((there, size) if to_engine else (size, there)))


def _address(array: ByteArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
