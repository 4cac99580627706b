"""LookupServer: answers, inside a worker, what the scheduler asks about this worker's cache.

One thread, one ROUTER socket over a Unix socket. Messages of one client are handled in their order,
so an unpin that was sent after a lookup ends that lookup's lease however late it is answered. The
thread never waits for a slow tier where the client asks with ``start``: it says "not yet" and sends
the answer when it is there; nor where it is to clear (``clears.py``). Nothing that arrives can end
the thread: a malformed message, an exception of the engine and a client that died are answered,
counted and forgotten. A client that dies takes nothing with it but its leases, which end at their
deadline.

Clears: what the lookup server removes on demand, in a thread of their own.

Removing everything from a slow store takes as long as that store does, and lookups go on meanwhile.
One runs at a time, the others wait in order. One that does not end keeps one thread, and no more
are begun after it. Callable from any thread.

LookupTarget: what the lookup server needs of a CacheEngine.

LateAnswers: answers that are ready after their question was put aside, on their way out.

Any thread may add one. The server's thread takes them; a file descriptor that it polls wakes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zmq

from kvkeep.engine.results import FoundTokens
from kvkeep.errors import KVKeepError, LookupServiceError
from kvkeep.hashing import TOKEN_BYTES
from kvkeep.identity import CacheIdentity
from kvkeep.lookup.protocol import (
    MAX_ERROR_CHARS,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Check,
    CheckReply,
    Clear,
    ClearReply,
    Counted,
    ErrorReply,
    Hello,
    HelloReply,
    Keep,
    Lookup,
    LookupReply,
    Numbers,
    NumbersReply,
    Reply,
    Request,
    Start,
    Started,
    Unpin,
    decode_request,
    encode,
    number_of,
)
from kvkeep.lookup.sockets import make_private, remove_stale_sockets
from kvkeep.metrics import Metrics
from kvkeep.tokens import RequestScope

#: One that runs for longer does not end: what comes after it is refused.
CLEAR_TIMEOUT_S = 120.0
#: How many wait.
MAX_WAITING = 16


class Clears:
    """Runs jobs one after the other; the thread lives as long as there are any."""

    def __init__(self) -> None:
        """Nothing is under way, and there is no thread."""
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()  # guarded by _lock
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._since = 0.0  # when the job under way began; guarded by _lock
        self._closed = False  # guarded by _lock

    def start(self, job: Callable[[], None]) -> str | None:
        """Run a job, which raises nothing, after those before it; why not, or None if it will."""
        with self._lock:
            if self._closed:
                return "the server is closing"
            if self._thread is not None and time.monotonic() - self._since > CLEAR_TIMEOUT_S:
                return f"an earlier one has not ended within {CLEAR_TIMEOUT_S:g} s"
            if len(self._waiting) >= MAX_WAITING:
                return f"{MAX_WAITING} others are waiting"
            if self._thread is None:
                thread = threading.Thread(
                    target=self._work, name="kvkeep-lookup-clear", daemon=True
                )
                try:
                    thread.start()  # it waits for the lock
                except RuntimeError as error:
                    return str(error)
                self._since = time.monotonic()
                self._thread = thread
            self._waiting.append(job)
        return None

    def close(self, timeout_s: float) -> None:
        """Drop what waits, and wait for the one under way."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                job = self._waiting.popleft()
                self._since = time.monotonic()
            job()


class LateAnswers:
    """A queue that can be polled."""

    def __init__(self) -> None:
        """Empty and open."""
        self._lock = threading.Lock()
        self._ready: deque[tuple[bytes, Reply]] = deque()  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._wake_recv, self._wake_send = os.pipe()
        os.set_blocking(self._wake_recv, False)
        os.set_blocking(self._wake_send, False)

    def fileno(self) -> int:
        """Readable while there are answers."""
        return self._wake_recv

    def add(self, client: bytes, reply: Reply) -> None:
        """An answer for a client; nothing once this is closed."""
        with self._lock:
            if not self._closed:
                self._ready.append((client, reply))
                with contextlib.suppress(BlockingIOError):  # then it is readable already
                    os.write(self._wake_send, b"\0")

    def take(self) -> list[tuple[bytes, Reply]]:
        """All answers so far, in the order in which they came."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                while not self._closed and os.read(self._wake_recv, 4096):
                    pass
            ready, self._ready = list(self._ready), deque()
        return ready

    def close(self) -> None:
        """Drop what is there and what still comes."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._ready.clear()
                os.close(self._wake_recv)
                os.close(self._wake_send)


class LookupTarget(Protocol):
    """What the server needs of a CacheEngine."""

    def lookup(
        self,
        tokens: object,
        *,
        lookup_id: str | None,
        pin: bool,
        scope: RequestScope,
        counted: bool,
    ) -> int:
        """See :meth:`kvkeep.engine.engine.CacheEngine.lookup`."""

    def async_lookup(
        self, tokens: object, *, lookup_id: str, scope: RequestScope, counted: bool
    ) -> Future[FoundTokens]:
        """See :meth:`kvkeep.engine.engine.CacheEngine.async_lookup`."""

    def lookup_unpin(self, lookup_id: str) -> object:
        """See :meth:`kvkeep.engine.engine.CacheEngine.lookup_unpin`."""

    def lookup_keep(self, lookup_id: str, num_tokens: int) -> None:
        """See :meth:`kvkeep.engine.engine.CacheEngine.lookup_keep`."""

    def check(self) -> CheckNumbers:
        """See :meth:`kvkeep.engine.engine.CacheEngine.check`."""

    def clear(self, locations: Collection[str] | None = None) -> int:
        """See :meth:`kvkeep.engine.engine.CacheEngine.clear`."""


class CheckNumbers(Protocol):
    """What the server reads of a CheckReport."""

    @property
    def open_leases(self) -> int:
        """Leases that no one has ended yet."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool handed out."""

    @property
    def free_bytes(self) -> int:
        """Bytes of the pool that can be handed out."""

    @property
    def capacity_bytes(self) -> int:
        """Size of the pool."""

    @property
    def num_chunks(self) -> int:
        """Chunks stored."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counters by name."""


logger = logging.getLogger(__name__)

#: How long :meth:`LookupServer.close` waits for the thread.
CLOSE_TIMEOUT_S = 5.0

#: Answers that wait for a client that does not read; what comes after them is dropped.
SEND_QUEUE = 1000


class LookupServer:
    """Answers lookups for one worker until it is closed."""

    def __init__(
        self, engine: LookupTarget, path: Path, *, identity: CacheIdentity, metrics: Metrics
    ) -> None:
        """Bind the socket and start the thread.

        Args:
            engine: the worker's engine.
            path: the Unix socket to bind; its directory is made for this user alone.
            identity: what the worker says about itself when asked.
            metrics: where failures are counted.

        Raises:
            LookupServiceError: the socket cannot be bound.
        """
        self._engine = engine
        self._path = path
        self._identity = identity
        self._metrics = metrics
        make_private(path.parent)
        remove_stale_sockets(path.parent)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._stop_send = self._context.socket(zmq.PAIR)
        self._stop_recv = self._context.socket(zmq.PAIR)
        self._late = LateAnswers()
        self._clears = Clears()
        self._closed = False
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.SNDHWM, SEND_QUEUE),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._stop_recv.bind("inproc://stop")
            self._stop_send.connect("inproc://stop")
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._late.close()
            raise LookupServiceError(f"cannot bind the lookup socket {path}: {error}") from error
        self._thread = threading.Thread(target=self._serve, name="kvkeep-lookup", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The Unix socket."""
        return self._path

    def close(self) -> None:
        """Stop the thread and remove the socket; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._stop_send.send(b"")
        self._clears.close(CLOSE_TIMEOUT_S)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the lookup thread did not end within %g s", CLOSE_TIMEOUT_S)
            return
        self._late.close()
        self._context.destroy(linger=0)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _serve(self) -> None:
        """The thread: one message after the other."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop_recv, zmq.POLLIN)
        poller.register(self._late, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_recv in ready:
                return
            try:
                for client, reply in self._late.take():
                    self._send(client, reply)
                if self._socket in ready:
                    self._serve_one()
            except Exception as error:  # noqa: BLE001  the thread outlives every message
                self._fail("serve", error)

    def _serve_one(self) -> None:
        """Read one message, answer it."""
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 2:
            raise LookupServiceError(f"a message of {len(frames)} frames, expected 2")
        client, data = frames
        reply = self._answer(client, data)
        if reply is not None:
            self._send(client, reply)

    def _send(self, client: bytes, reply: Reply) -> None:
        with contextlib.suppress(zmq.Again):  # a client that does not read loses the answer
            self._socket.send_multipart([client, encode(reply)], zmq.NOBLOCK)

    def _answer(self, client: bytes, data: bytes) -> Reply | None:
        """The answer to one message, an ErrorReply if anything fails."""
        seq = 0
        try:
            request = decode_request(data)
            seq = request.seq
            return self._dispatch(client, request)
        except Exception as error:  # noqa: BLE001  the top of this task
            # whoever asks need not wait for an answer
            return self._failed("lookup", seq or number_of(data), error)

    def _dispatch(self, client: bytes, request: Request) -> Reply | None:
        match request:
            case Lookup():
                return _found_reply(request.seq, self._lookup(request))
            case Start():
                return self._start(client, request)
            case Hello():
                return self._hello(request)
            case Check() | Numbers():
                return self._check(request)
            case Clear():
                return self._clear_later(client, request)
            case Counted() | Keep() | Unpin():
                self._take_notice(request)
        return None

    def _clear_later(self, client: bytes, request: Clear) -> ErrorReply | None:
        """Clear in a thread of its own, which answers; an answer now says why not."""

        def clear() -> None:
            try:
                removed = self._engine.clear(request.locations or None)
            except Exception as error:  # noqa: BLE001  the top of this task
                self._late.add(client, self._failed("clear", request.seq, error))
            else:
                self._late.add(client, ClearReply(request.seq, removed))

        refusal = self._clears.start(clear)
        return None if refusal is None else ErrorReply(request.seq, f"not cleared: {refusal}")

    def _take_notice(self, notice: Counted | Keep | Unpin) -> None:
        """What is not answered."""
        match notice:
            case Counted():
                self._count(notice)
            case Keep():
                self._engine.lookup_keep(notice.lookup_id, notice.num_tokens)
            case Unpin():
                for lookup_id in notice.lookup_ids:
                    self._engine.lookup_unpin(lookup_id)

    def _check(self, request: Check | Numbers) -> CheckReply | NumbersReply:
        if isinstance(request, Numbers):
            return NumbersReply(request.seq, self._metrics.snapshot())
        report = self._engine.check()
        return CheckReply(
            request.seq,
            report.open_leases,
            report.used_bytes,
            report.free_bytes,
            report.capacity_bytes,
            report.num_chunks,
            dict(report.metrics),
        )

    def _lookup(self, request: Lookup) -> int:
        return self._engine.lookup(
            _token_ids(request.tokens),
            lookup_id=request.lookup_id,
            pin=request.pin,
            scope=request.scope.scope(),
            counted=False,  # the client does: only it knows whether the answer came in time
        )

    def _start(self, client: bytes, request: Start) -> Reply:
        """The answer if it is there already, else "not yet", and the answer when it is there."""
        future = self._engine.async_lookup(
            _token_ids(request.tokens),
            lookup_id=request.lookup_id,
            scope=request.scope.scope(),
            counted=False,
        )
        if future.done():
            return _found_reply(request.seq, future.result())
        future.add_done_callback(
            lambda done: self._late.add(client, _found_reply(request.seq, done.result()))
        )
        return Started(request.seq)

    def _count(self, message: Counted) -> None:
        self._metrics.lookup(asked=message.asked, found=dict(message.found))
        for cause, num_tokens in message.failed:
            self._metrics.lookup_failed(num_tokens, cause)

    def _hello(self, request: Hello) -> HelloReply:
        if request.protocol != PROTOCOL:
            raise LookupServiceError(
                f"the client speaks version {request.protocol} of the protocol, not {PROTOCOL}"
            )
        identity = self._identity
        return HelloReply(
            request.seq,
            PROTOCOL,
            identity.rank,
            identity.world_size,
            identity.chunk_size,
            identity.digest(),
        )

    def _failed(self, operation: str, seq: int, error: Exception) -> ErrorReply:
        """Count a failure; what the client is told."""
        self._fail(operation, error)
        return ErrorReply(seq, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS])

    def _fail(self, operation: str, error: Exception) -> None:
        cause = "malformed" if isinstance(error, LookupServiceError) else type(error).__name__
        self._metrics.failure("lookup", operation, cause)
        logger.warning(
            "lookup server: %s failed: %s",
            operation,
            error,
            exc_info=not isinstance(error, KVKeepError),
        )


def _token_ids(data: bytes) -> npt.NDArray[np.uint32]:
    if len(data) % TOKEN_BYTES:
        raise LookupServiceError(f"{len(data)} bytes are no whole number of token ids")
    return np.frombuffer(data, "<u4")


def _found_reply(seq: int, found: int) -> LookupReply:
    return LookupReply(seq, int(found), found.tiers if isinstance(found, FoundTokens) else ())
