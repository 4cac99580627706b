"""HostTransfer: the copies of one call between caches and chunks that are both in CPU memory.

Made by the connectors, once per call; its parts may be copied from several threads at once, and the
interpreter's lock is free while bytes move. Two ways to the same bytes: the compiled one
(``native_transfer.py``), and numpy's here, where an installation has no compiled one. numpy gathers
and scatters whole rows at the speed of ``memmove``, where the index operations of torch reach a
tenth to a half of it on the CPU.

RowCopier: the compiled copies of rows (``_rows.c``), where the installation has them.

The library is built when kvkeep is installed (``scripts/build_rows.py``); without a C compiler
there is none, and numpy copies (``host.py``). It is loaded once, at the first transfer. A copier
may be used from any thread, and the interpreter's lock is free while it copies.

NativeTransfer: a HostTransfer whose copies are compiled code, one call per layer and tensor.

What leaves this module are addresses, so it checks again that every row lies in its cache or chunk.
Made by the connectors, once per call; parts may be copied from several threads at once. The arrays
that the addresses point into are held until the transfer is gone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvkeep.gpu.pages import Int64Array, Segment, segments_of

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


logger = logging.getLogger(__name__)

#: Its second dot keeps Python from taking it for a module.
LIBRARY = Path(__file__).with_name("_rows.native.so")
#: VERSION in ``_rows.c``.
VERSION = 1

#: Addresses as numbers; below 2**63 for programs on every system.
Addresses = npt.NDArray[np.int64]


class How(IntEnum):
    """How rows are copied, as ``_rows.c`` numbers it."""

    PLAIN = 0
    """With ``memcpy``: what was written is in the cache afterwards."""
    STREAM = 1
    """Past the caches, one row after the other."""
    STREAM_FOUR = 2
    """Past the caches, four rows at a time."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a row consists of.

    Attributes:
        count: pieces in a row.
        num_bytes: bytes of each.
        to_step: bytes from one to the next where they are written.
        from_step: the same where they are read.
    """

    count: int
    num_bytes: int
    to_step: int
    from_step: int


class RowCopier:
    """The library. It believes its arguments: who calls it has checked that all is in bounds."""

    def __init__(self, path: Path = LIBRARY) -> None:
        """Load the library.

        Raises:
            OSError: there is none, or it is no library for this machine.
            ValueError: it was built from another version of its source.
        """
        library = ctypes.CDLL(str(path))
        try:
            version = int(library.kvkeep_rows_version())
        except AttributeError:
            version = 0
        if version != VERSION:
            raise ValueError(f"{path} has version {version}, version {VERSION} is needed")
        self._copy = library.kvkeep_copy_rows
        size = ctypes.c_size_t
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *5 * (size,), ctypes.c_int)
        self._copy.restype = None

    def copy(self, to: Addresses, source: Addresses, pieces: Pieces, how: How) -> None:
        """Copy rows; complete on return, and visible to other threads.

        Args:
            to: where each row begins that is written, contiguous.
            source: where each row begins that is read, contiguous and as long.
            pieces: what each row consists of.
            how: the way.

        Raises:
            ValueError: the arrays are not as long as each other, or not contiguous.
        """
        if len(to) != len(source) or not (to.flags.c_contiguous and source.flags.c_contiguous):
            raise ValueError(f"{len(to)} and {len(source)} rows, or addresses that are apart")
        self._copy(
            to.ctypes.data,
            source.ctypes.data,
            len(to),
            pieces.num_bytes,
            pieces.count,
            pieces.to_step,
            pieces.from_step,
            how,
        )


@functools.cache
def load_rows() -> RowCopier | None:
    """The library of this installation, or None; says once in the log why there is none."""
    if not LIBRARY.exists():
        logger.info(
            "copies between the engine's memory and the pool are numpy's: kvkeep was installed "
            "without a C compiler; with one they are faster"
        )
        return None
    try:
        return RowCopier()
    except (OSError, ValueError) as error:
        logger.warning(
            "copies between the engine's memory and the pool are numpy's, the compiled ones do not "
            "load (%s); install kvkeep again",
            error,
        )
        return None


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
