"""ChunkLoad: one chunk on its way in from a store; the sink of its value.

It owns a reference to its memory until it is over, so memory is never given back under a call that
still writes into it, however long the reader has given up. Verifies everything, then answers.
``future`` may be waited for from any thread; everything else belongs to the I/O thread.

ChunkValue: one chunk on its way out to a store; the counterpart of ChunkLoad.

Its header holds the checksum of its payload, which is taken as late as a client allows: while the
payload is sent, piece by piece, or right before. Used by one I/O thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from kvkeep.backends.remote.base import HEADER_BYTES, RemoteReports, Value, ValueSink
from kvkeep.codec.frame import (
    CODEC_RAW,
    Buffer,
    ChunkMeta,
    FrameFault,
    FrameHeader,
    new_hasher,
    parse_header,
)
from kvkeep.codec.names import decode_chunk
from kvkeep.errors import CodecError
from kvkeep.hashing import ChunkKey
from kvkeep.memory.base import MemoryObj

#: Causes of misses beside the faults of frames.
NO_MEMORY, MISSING, UNFINISHED = "no_memory", "missing", "unfinished"
_NOTHING = memoryview(bytearray())


@dataclass(frozen=True, slots=True)
class LoadRules:
    """What every load of a tier must keep to.

    Attributes:
        identity: digest that a header must have.
        full: a full chunk; others may be shorter, and are nothing else.
        allocate: memory for a chunk that is not full, at once or not at all.
        reports: where it is counted.
    """

    identity: bytes
    full: ChunkMeta
    allocate: Callable[[ChunkMeta], MemoryObj | None]
    reports: RemoteReports

    def fault_of(self, header: FrameHeader, key: ChunkKey, size_bytes: int) -> FrameFault | None:
        """What is wrong with a value by its header and its whole size."""
        needed = HEADER_BYTES + header.payload_bytes
        if size_bytes != needed:
            return FrameFault.TRUNCATED if size_bytes < needed else FrameFault.LENGTH
        if header.key != key:
            return FrameFault.WRONG_KEY
        if header.identity != self.identity:
            return FrameFault.WRONG_IDENTITY
        return None if fits(header.meta, self.full) else FrameFault.WRONG_LAYOUT


def fits(meta: ChunkMeta, full: ChunkMeta) -> bool:
    """A chunk can be one of the engine's: full, or shorter in some dimension."""
    return (
        (meta.fmt, meta.dtype, len(meta.shape)) == (full.fmt, full.dtype, len(full.shape))
        and all(mine <= most for mine, most in zip(meta.shape, full.shape, strict=True))
        and meta.size_bytes > 0
    )


@dataclass(slots=True)
class Clock:
    """When the last load of a call was over: what a load takes counts from there."""

    since: float = field(default_factory=time.perf_counter)

    def lap_s(self) -> float:
        """Seconds since the last lap."""
        before, self.since = self.since, time.perf_counter()
        return self.since - before


class ChunkLoad(ValueSink):
    """One load."""

    def __init__(self, name: str, key: ChunkKey, obj: MemoryObj, rules: LoadRules) -> None:
        """Take over the caller's reference to ``obj``, which has room for a full chunk."""
        self.name = name
        self.key = key
        self.future: Future[MemoryObj | None] = Future()
        self.clock = Clock()
        #: Why it is a miss; None if it is none, or nobody knows yet.
        self.cause: str | None = None
        #: The value is no good and has to be removed.
        self.is_bad = False
        self.is_over = False
        self._rules = rules
        self._obj: MemoryObj | None = obj
        self._own_view = obj.byte_array
        self._header: FrameHeader | None = None
        self._other: MemoryObj | None = None  # for a chunk that is not full
        self._target: memoryview | None = None  # of the payload
        self._out = self._own_view  # of the chunk
        self._hasher = new_hasher()
        self._hashed = 0

    def expected(self, payload_bytes: int) -> memoryview | None:
        """See the interface: memory for a full chunk as it is."""
        return self._own_view if payload_bytes == len(self._own_view) else None

    def begin(self, header: Buffer, size_bytes: int) -> memoryview | None:
        """See the interface."""
        self._drop_other()
        self._target = None
        self._hasher, self._hashed = new_hasher(), 0
        if size_bytes > HEADER_BYTES + self._rules.full.size_bytes:
            self._refuse(FrameFault.LENGTH)
            return None
        parsed = parse_header(header)
        if isinstance(parsed, FrameFault):
            self._refuse(parsed)
            return None
        fault = self._rules.fault_of(parsed, self.key, size_bytes)
        if fault is not None:
            self._refuse(fault)
            return None
        out = self._own_view
        if parsed.meta != self._rules.full:
            self._other = self._rules.allocate(parsed.meta)
            if self._other is None:
                self.cause = NO_MEMORY
                self._end(None)
                return None
            out = self._other.byte_array
        self._header, self._out = parsed, out
        is_raw = parsed.codec == CODEC_RAW
        self._target = out if is_raw else memoryview(bytearray(parsed.payload_bytes))
        return self._target

    def filled(self, payload_bytes: int) -> None:
        """See the interface."""
        if self._target is not None and payload_bytes > self._hashed:
            self._hasher.update(self._target[self._hashed : payload_bytes])
            self._hashed = payload_bytes

    def finish(self) -> None:
        """See the interface."""
        header, target = self._header, self._target
        if self.is_over or header is None or target is None:
            return
        self.filled(header.payload_bytes)
        if self._hasher.digest() != header.payload_checksum:
            self._refuse(FrameFault.PAYLOAD_CHECKSUM)
            return
        if header.codec != CODEC_RAW:
            try:
                decode_chunk(header.codec, target, self._out, header.meta)
            except CodecError:
                self._refuse(FrameFault.CODEC)
                return
        self._rules.reports.loaded(len(self._out), self.clock.lap_s())
        if self._other is None:
            self._other, self._obj = self._obj, None
        obj, self._other = self._other, None
        self._end(obj)

    def hold(self) -> Callable[[], None]:
        """See the interface: one more reference to the memory for a full chunk."""
        obj = self._obj
        if obj is None:
            return lambda: None
        obj.ref_count_up()
        return obj.ref_count_down

    def fail(self, cause: str) -> None:
        """See the interface."""
        self._refuse(cause)

    def end(self, cause: str) -> None:
        """No call will fill it any more; a miss for this reason, unless it is over already."""
        if not self.is_over:
            begun = self._target is not None
            self.cause = UNFINISHED if begun and cause == MISSING else cause
            self._end(None)

    def _refuse(self, cause: str) -> None:
        """The value is no good."""
        self.cause, self.is_bad = cause, True
        self._end(None)

    def _end(self, obj: MemoryObj | None) -> None:
        """Give back what is not needed, and answer. ``obj`` is the reader's if it still waits."""
        if self.is_over:
            return
        self.is_over = True
        self._target = None
        self._own_view = self._out = _NOTHING
        own, self._obj = self._obj, None
        if own is not None:
            own.ref_count_down()
        self._drop_other()
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(obj)
        elif obj is not None:
            obj.ref_count_down()

    def _drop_other(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            other.ref_count_down()


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
