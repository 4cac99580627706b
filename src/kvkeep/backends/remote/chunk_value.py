"""ChunkValue: one chunk on its way out to a store; the counterpart of ChunkLoad.

Its header holds the checksum of its payload, which is taken as late as a client allows: while the
payload is sent, piece by piece, or right before. Used by one I/O thread.
"""

from __future__ import annotations

from dataclasses import replace

from kvkeep.backends.remote.base import HEADER_BYTES, Value
from kvkeep.codec.frame import Buffer, FrameHeader, new_hasher


class ChunkValue(Value):
    """A value that makes its own header."""

    __slots__ = ("_frame", "_hashed", "_hasher", "_view")

    def __init__(self, frame: FrameHeader, payload: Buffer) -> None:
        """A value of a chunk.

        Args:
            frame: its header but for the payload's checksum.
            payload: the bytes that it is the header of.
        """
        super().__init__(b"", payload)
        self._frame = frame
        self._view = memoryview(payload).cast("B")
        self._hasher = new_hasher()
        self._hashed = 0

    @property
    def header(self) -> bytes:
        """See the interface."""
        if not self._header:
            self.sending(len(self._view))
            self._header = replace(self._frame, payload_checksum=self._hasher.digest()).pack()
        return self._header

    @property
    def size_bytes(self) -> int:
        """See the interface."""
        return HEADER_BYTES + len(self._view)

    def sending(self, payload_bytes: int) -> None:
        """See the interface."""
        if payload_bytes > self._hashed:
            self._hasher.update(self._view[self._hashed : payload_bytes])
            self._hashed = payload_bytes
