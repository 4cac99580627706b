"""HostPinning: tells CUDA that pool memory stays where it is.

Copies then run asynchronously and at full speed. Pinning commits memory. It is therefore done step
by step, when a step is used for the first time, and never for the whole pool at once. The allocator
that owns the memory calls it, with its lock held.
"""

from __future__ import annotations

import logging
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

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
