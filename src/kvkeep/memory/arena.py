"""Arena: one lazily committed piece of memory that allocators cut into memory objects.

Making one reserves addresses and commits nothing, however large it is; the system commits a page
when it is first written. Memory is named by its offset in the arena, never by its address, so an
arena in shared memory means the same in every process that maps it. Callable from any thread.

HostPinning: tells CUDA that pool memory stays where it is.

Copies then run asynchronously and at full speed. Pinning commits memory. It is therefore done step
by step, when a step is used for the first time, and never for the whole pool at once. The allocator
that owns the memory calls it, with its lock held.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.errors import OwnershipError
from kvkeep.memory.placement import NUMA_TOPIC, Choice, ask_for_huge_pages, prefer_node
from kvkeep.memory.shared import MAP_NORESERVE, SharedSegment

#: Linux 5.14: commit pages as if they had been written, without changing them.
_MADV_POPULATE_WRITE = 23


class Arena:
    """A range of bytes, from offset 0 to ``size_bytes``.

    Attributes:
        size_bytes: its size.
        choices: how the memory was made, and what the system did not grant.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        shared_name: str | None = None,
        shareable: bool = False,
        huge_pages: bool = True,
    ) -> None:
        """Reserve the memory.

        Args:
            size_bytes: its size.
            shared_name: make it shared memory of this name, for :meth:`attach` in other processes.
            shareable: make it shared memory in any case, so that ``fileno`` can be sent to others.
            huge_pages: ask for huge pages, where the system gives them on request.

        Raises:
            ValueError: the size is not positive, the name is malformed or shared memory is too
                small.
            OwnershipError: a living process has shared memory of this name.
            OSError: the system refuses.
        """
        if size_bytes < 1:
            raise ValueError(f"an arena needs a positive size, got {size_bytes}")
        segment = None
        if shared_name is not None:
            segment = SharedSegment.make(shared_name, size_bytes)
        elif shareable:
            segment = SharedSegment.make_unnamed(size_bytes)
        self._open(size_bytes, segment, huge_pages)

    @classmethod
    def attach(cls, shared_name: str, *, huge_pages: bool = True) -> Arena:
        """Map the arena that another process made with this ``shared_name``.

        Raises:
            ValueError: the name is malformed or names an empty segment.
            FileNotFoundError: there is none.
        """
        segment = SharedSegment.open(shared_name)
        if segment.size_bytes < 1:
            segment.close()
            raise ValueError(f"shared memory {shared_name!r} is empty; is it still being made?")
        arena = cls.__new__(cls)
        arena._open(segment.size_bytes, segment, huge_pages)
        return arena

    def _open(self, size_bytes: int, segment: SharedSegment | None, huge_pages: bool) -> None:
        self.size_bytes = size_bytes
        self._segment = segment
        self._lock = threading.Lock()
        self._claims: dict[int, int] = {}  # start -> end of the allocators' parts; by _lock
        try:
            self._map: mmap.mmap | None = _map_memory(size_bytes, segment)
        except BaseException:
            if segment is not None:
                segment.close()
            raise
        is_shared = segment is not None
        self.choices = [
            _describe(segment),
            ask_for_huge_pages(self._map, is_shared=is_shared, wanted=huge_pages),
        ]
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes, one-dimensional, writable.

        Raises:
            OwnershipError: the arena is closed.
        """
        array = self._array
        if array is None:
            raise OwnershipError("an arena was used after it was closed")
        return array

    @property
    def shared_name(self) -> str | None:
        """The name for :meth:`attach`, if the memory is shared."""
        return (self._segment.name or None) if self._segment is not None else None

    @property
    def fileno(self) -> int | None:
        """The descriptor of the memory, if it is shared and open."""
        segment = self._segment
        return segment.fd if segment is not None and segment.fd >= 0 else None

    def offset_of(self, array: npt.NDArray[np.uint8]) -> int:
        """Where bytes of the arena begin in it.

        Raises:
            ValueError: they are not the arena's.
            OwnershipError: the arena is closed.
        """
        offset: int = (
            array.__array_interface__["data"][0] - self.array.__array_interface__["data"][0]
        )
        if not 0 <= offset <= self.size_bytes - array.nbytes:
            raise ValueError("these bytes are not in this arena")
        return offset

    @property
    def is_closed(self) -> bool:
        """The memory was given back to the system, or will be with the last view of it."""
        return self._array is None

    def place_on(self, choice: Choice, node: int | None) -> None:
        """Have memory that is not committed yet come from a NUMA node.

        A system that does not do it is no error; ``choices`` says so then.

        Args:
            choice: why this node, see :func:`kvkeep.memory.placement.choose_node`.
            node: the node; None for no preference.

        Raises:
            OwnershipError: the arena is closed.
        """
        refused = prefer_node(self.array, node) if node is not None else None
        if refused is not None:
            choice = Choice(NUMA_TOPIC, "any", f"{choice.why}, but {refused}")
        self.choices.append(choice)

    def claim(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        """Become the allocator of the bytes [start, end).

        Raises:
            ValueError: the range is empty, outside the arena, or overlaps another allocator's.
            OwnershipError: the arena is closed.
        """
        if not 0 <= start < end <= self.size_bytes:
            raise ValueError(f"[{start}, {end}) is no range of an arena of {self.size_bytes} bytes")
        array = self.array
        with self._lock:
            for other_start, other_end in self._claims.items():
                if start < other_end and other_start < end:
                    raise ValueError(
                        f"[{start}, {end}) overlaps [{other_start}, {other_end}), "
                        "which another allocator owns"
                    )
            self._claims[start] = end
        return array[start:end]

    def give_back(self, start: int) -> None:
        """End the claim that begins at ``start``; the end of the last one closes the arena."""
        with self._lock:
            ended = self._claims.pop(start, None)
            if ended is None or self._claims:
                return
        self.close()

    def prefault(self, start: int, end: int) -> None:
        """Commit the pages of [start, end) now; their content stays as it is.

        Other threads run meanwhile.

        Raises:
            ValueError: it is no range of the arena.
            OSError: the system has not enough memory, or cannot do this (Linux before 5.14).
            OwnershipError: the arena is closed.
        """
        if not 0 <= start <= end <= self.size_bytes:
            raise ValueError(f"[{start}, {end}) is no range of an arena of {self.size_bytes} bytes")
        array = self.array  # keeps the memory mapped meanwhile
        if start == end:
            return
        first = start - start % mmap.PAGESIZE
        address: int = array.__array_interface__["data"][0]
        if _madvise(address + first, end - first, _MADV_POPULATE_WRITE) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"memory cannot be committed ahead: {os.strerror(error)}")

    def close(self) -> None:
        """Give the memory back to the system; a second call does nothing.

        Views that are still held stay readable, they never point to unmapped memory: the system
        gets its memory back when the last of them is gone.
        """
        with self._lock:
            if self._array is None:
                return
            self._array = None
            mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # views exist: the last one unmaps
                mapping.close()
        if self._segment is not None:
            self._segment.close()


def _madvise(address: int, size_bytes: int, advice: int) -> int:
    """The system call; unlike ``mmap.madvise`` it does not hold the interpreter's lock."""
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes, function.restype = (
        (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        ctypes.c_int,
    )
    return int(function(address, size_bytes, advice))


def _describe(segment: SharedSegment | None) -> Choice:
    if segment is None:
        return Choice("memory", "private to the process", "no name was given")
    if segment.name:
        return Choice("memory", f"shared as {segment.name}", "a name was given")
    return Choice("memory", "shared without a name", "other ranks copy out of it")


def _map_memory(size_bytes: int, segment: SharedSegment | None) -> mmap.mmap:
    if segment is not None:
        return mmap.mmap(segment.fd, size_bytes, flags=mmap.MAP_SHARED | MAP_NORESERVE)
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)


_log = logging.getLogger(__name__)


class HostPinning:
    """Registers the bytes of one array with CUDA, from the start onwards."""

    def __init__(self, array: npt.NDArray[np.uint8], step_bytes: int, cudart: ModuleType) -> None:
        """Register nothing yet.

        Args:
            array: the memory, one-dimensional.
            step_bytes: size of one registration. No memory object may cross a multiple of it, since
                a copy must not span two registrations.
            cudart: the CUDA runtime, ``torch.cuda.cudart()``.
        """
        self._address: int = array.__array_interface__["data"][0]
        self._size_bytes = array.size
        self._step_bytes = step_bytes
        self._cudart = cudart
        self._end = 0
        self._registered: list[int] = []
        self._failed = False

    @classmethod
    def if_cuda(cls, array: npt.NDArray[np.uint8], step_bytes: int) -> HostPinning | None:
        """The pinning of ``array`` where there is a CUDA device, otherwise None."""
        if not torch.cuda.is_available():
            return None
        return cls(array, step_bytes, torch.cuda.cudart())  # type: ignore[no-untyped-call]

    @property
    def pinned_bytes(self) -> int:
        """Bytes from the start that are registered."""
        return min(len(self._registered) * self._step_bytes, self._size_bytes)

    def cover(self, end: int) -> None:
        """Register the steps up to and including the byte before ``end``.

        A refusal (a limit on locked memory, say) is logged once; the memory stays usable, unpinned.
        """
        while self._end < end and not self._failed:
            length = min(self._step_bytes, self._size_bytes - self._end)
            address = self._address + self._end
            error = self._cudart.cudaHostRegister(address, length, 0)
            if int(error) != 0:
                self._failed = True
                _log.warning("CUDA refuses to pin more than %d bytes: %s", self.pinned_bytes, error)
                return
            self._registered.append(address)
            self._end += length

    def close(self) -> None:
        """Undo all registrations; a second call does nothing."""
        registered, self._registered = self._registered, []
        self._failed = True
        for address in registered:
            error = self._cudart.cudaHostUnregister(address)
            if int(error) != 0:
                _log.warning("CUDA refuses to unpin memory: %s", error)
