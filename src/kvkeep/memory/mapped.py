"""MappedPool: another process's pool, to read from.

Its owner hands out the memory; here are views of it, which belong to nobody. Callable from any
thread.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import torch

from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj, MemoryObjMetadata
from kvkeep.memory.shared_segment import MAP_NORESERVE


class MappedPool:
    """A pool in shared memory, mapped so that writing to it changes nothing for its owner."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the memory.

        Args:
            fd: the memory; closed here, whatever happens.
            size_bytes: its size.

        Raises:
            ValueError: there is less.
            OSError: the system refuses.
        """
        try:
            if not 0 < size_bytes <= os.fstat(fd).st_size:
                raise ValueError(f"there are no {size_bytes} bytes of shared memory")
            # private, not read-only: what reads with torch wants memory that can be written
            self._map = mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
        finally:
            os.close(fd)
        self.size_bytes = size_bytes
        self.count_lock = threading.RLock()
        self._array = np.frombuffer(self._map, dtype=np.uint8)

    def view(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat
    ) -> MemoryObj:
        """The object at ``offset``, with a reference for the caller.

        Raises:
            ValueError: it is not inside the pool.
        """
        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + size > self.size_bytes:
            raise ValueError(f"[{offset}, {offset + size}) is not inside {self.size_bytes} bytes")
        meta = MemoryObjMetadata(tuple(shape), dtype, fmt, size)
        return MemoryObj(self, offset, self._array, meta)

    def note_release_locked(self, ended: MemoryObj | None) -> None:
        """Nothing: the memory is its owner's."""

    def close(self) -> None:
        """Let go of the memory; views that are still held stay readable."""
        self._array = np.empty(0, np.uint8)
        self.size_bytes = 0
        with contextlib.suppress(BufferError):  # views exist: the last one unmaps
            self._map.close()
