"""TierAvailability: whether a tier with I/O threads can be used now, and how it recovers.

It can be out for four reasons: it is closed, it was not opened yet, one call has been running for
too long, or calls failed several times in a row. Stores can be out alone. Callable from any thread;
nothing here waits.

CircuitBreaker: leaves a failing medium alone for a while, then tries it once.

Callable from any thread.

Pieces: how payloads are cut while they are moved and their checksum is taken. Pure.

A piece is moved, then its checksum is taken while it is still in the processor's cache (or the
other way round). Small pieces cost calls and turns at the interpreter's lock, large ones do not
stay in the cache (docs/performance.md has the figures).

pin_loaded: what a slow tier has read for a lookup becomes the lease's, and memory's.

Callable from any thread; takes the locks of the allocator backend and of the lease, one by one.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from kvkeep.backends.io_pool import IOPool

_THRESHOLD = 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0


class CircuitBreaker:
    """Opens after some failures in a row; the next success closes it.

    While it is open, one attempt is allowed after each pause, and the pauses grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """A closed one.

        Args:
            clock: seconds that only grow.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # guarded by _lock
        self._pause_s = _FIRST_PAUSE_S  # guarded by _lock
        self._retry_at = 0.0  # guarded by _lock

    @property
    def is_open(self) -> bool:
        """The last attempts failed."""
        return self._failures >= _THRESHOLD

    def allows(self) -> bool:
        """An attempt may be made now. While open, True once per pause."""
        with self._lock:
            if self._failures < _THRESHOLD:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._pause_s
            return True

    def succeeded(self) -> None:
        """An attempt worked."""
        if self._failures:
            with self._lock:
                self._failures = 0
                self._pause_s = _FIRST_PAUSE_S

    def failed(self) -> None:
        """An attempt failed."""
        with self._lock:
            self._failures += 1
            if self._failures >= _THRESHOLD:
                self._retry_at = self._clock() + self._pause_s
                self._pause_s = min(self._pause_s * 2, _LAST_PAUSE_S)

    def trip(self) -> None:
        """Open at once: the medium cannot be used at all."""
        with self._lock:
            self._failures = max(self._failures, _THRESHOLD - 1)
        self.failed()


class TierAvailability(ABC):
    """Says yes or no before each call, and tries again in the background.

    Attributes:
        loads: of all calls but those that store.
        stores: of calls that store.
    """

    def __init__(
        self,
        pool: IOPool,
        *,
        breakers: tuple[CircuitBreaker, CircuitBreaker],
        stall_timeout_s: float,
    ) -> None:
        """Nothing is tried before :meth:`open`.

        Args:
            pool: where tries run.
            breakers: of loads, and of stores.
            stall_timeout_s: a call that runs for longer means that the medium hangs.
        """
        self._pool = pool
        self.loads, self.stores = breakers
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._trying: Future[None] | None = None  # guarded by _lock
        self._is_closed = False  # guarded by _lock

    @property
    def is_open(self) -> bool:
        """The tier was opened, or needs no opening."""
        return True

    @property
    def is_closed(self) -> bool:
        """Nothing is allowed any more."""
        return self._is_closed

    @abstractmethod
    def _try_first(self) -> None:
        """Open the tier or try it; runs in an I/O thread, once, and tells the breakers."""

    @abstractmethod
    def _try_again(self) -> None:
        """Try it while loads are out; runs in an I/O thread, and tells the breakers."""

    def open(self) -> Future[None]:
        """Try the tier for the first time, in the background."""
        with self._lock:
            self._trying = self._pool.load(self._try_first)
            return self._trying

    def close(self) -> bool:
        """Allow nothing any more; False if it was closed already."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        return not was_closed

    def why_no_loads(self) -> str | None:
        """The reason why nothing can be read now, None if it can."""
        if self._is_closed:
            return "closed"
        if not self.is_open:
            return "not_open"
        if self._pool.longest_running_s() > self._stall_timeout_s:
            return "stalled"
        return "failing" if self.loads.is_open else None

    def why_no_stores(self) -> str | None:
        """The reason why nothing can be written now. None while failing, too, once per pause."""
        problem = self.why_no_loads()
        if problem is not None:
            self.retry()
            return problem
        return None if self.stores.allows() else "failing"

    def may_load(self) -> bool:
        """Whether loads and lookups may go to the tier; if not, this may start another try."""
        if self.why_no_loads() is None:
            return True
        self.retry()
        return False

    def retry(self) -> None:
        """Try again in the background, if it is time and no try is under way."""
        with self._lock:
            if self._is_closed or (self._trying is not None and not self._trying.done()):
                return
            if self.loads.is_open and self.loads.allows():
                self._trying = self._pool.load(self._try_again, first=True)


#: Bytes of a piece.
PIECE_BYTES = 1 << 20
#: Into how many pieces a large load is cut, and the largest of them.
_LOAD_PIECES, _MAX_LOAD_PIECE_BYTES = 4, 4 << 20


def load_piece_bytes(size_bytes: int) -> int:
    """Bytes of a piece of a chunk that somebody waits for.

    The engine's thread may spin meanwhile and hold the interpreter's lock, for which each piece
    waits twice. So there are few of them, as far as the cache allows.

    Args:
        size_bytes: of the chunk.

    Returns:
        A multiple of ``PIECE_BYTES``.
    """
    wanted = -(-size_bytes // (_LOAD_PIECES * PIECE_BYTES)) * PIECE_BYTES
    return min(_MAX_LOAD_PIECE_BYTES, max(PIECE_BYTES, wanted))


def pieces(
    buffer: memoryview, offset: int = 0, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[int, memoryview]]:
    """A buffer of bytes in pieces, each with its position in the buffer.

    Args:
        buffer: what is cut.
        offset: where it begins in the file that it is read from or written to. All pieces but the
            first begin at a multiple of ``piece_bytes`` there: two calls that share a page of the
            file cost more than two that do not. What a header has moved beyond the last multiple
            belongs to the last piece.
        piece_bytes: of a piece.
    """
    position, size = 0, len(buffer)
    while position < size:
        end = position + piece_bytes - (offset + position) % piece_bytes
        if size - end <= min(offset, piece_bytes // 2):
            end = size
        yield position, buffer[position:end]
        position = end
