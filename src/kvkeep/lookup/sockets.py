"""Where the lookup sockets live: one per rank, in a directory that only its owner can enter.

Pure path arithmetic and one directory; callable from any thread, in the scheduler and in the
workers alike.

Workers: the sockets to all ranks of one engine, and which of them are down.

A worker that missed a deadline is down: it is not waited for again until it has answered something,
and a probe that nobody waits for finds that out. So a dead worker costs one deadline, not one per
request. Used with the client's lock held, by one thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import socket
import stat
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import zmq

from kvkeep.errors import LookupServiceError
from kvkeep.lookup.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Hello,
    Keep,
    Reply,
    Request,
    Unpin,
    decode_reply,
    encode,
)

#: Bytes that a Unix socket's path may have on every system: 107 on Linux, 103 on macOS.
MAX_PATH_BYTES = 103

#: A socket may be bound and not listened on yet for a moment; after that long it is no moment.
STALE_AFTER_S = 60.0
STALE_PROBE_TIMEOUT_S = 0.2


def socket_directory(base: Path | None, env: Mapping[str, str]) -> Path:
    """The directory of this user's lookup sockets.

    Args:
        base: the directory to make it in; None for ``$XDG_RUNTIME_DIR``, else the temporary
            directory.
        env: environment variables.
    """
    if base is None:
        runtime = env.get("XDG_RUNTIME_DIR")
        base = Path(runtime) if runtime and Path(runtime).is_dir() else Path(tempfile.gettempdir())
    return base / f"kvkeep-{os.getuid()}"


def socket_path(directory: Path, engine: str, rank: int) -> Path:
    """The socket of one worker.

    Args:
        directory: see :func:`socket_directory`.
        engine: name of the engine instance, of any length.
        rank: the worker's rank in it.

    Raises:
        LookupServiceError: the path is longer than a Unix socket's may be.
    """
    return _checked(directory / f"{_short(engine)}-{rank}.sock")


def _short(engine: str) -> str:
    return hashlib.sha256(engine.encode()).hexdigest()[:16]


def _checked(path: Path) -> Path:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise LookupServiceError(
            f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes; "
            "set lookup.socket_dir to a shorter directory"
        )
    return path


def ranks_path(directory: Path, engine: str) -> Path:
    """The socket where the ranks of an engine meet, beside those of their lookups.

    It answers no lookups, and so is no ``.sock``: `kvkeep top` does not ask it.

    Raises:
        LookupServiceError: the path is longer than a Unix socket's may be.
    """
    return _checked(directory / f"{_short(engine)}.ranks")


def make_private(directory: Path) -> None:
    """Create ``directory`` for this user alone, or check that it is so already.

    Raises:
        LookupServiceError: it cannot be made, belongs to somebody else, is a link, or others may
            enter it.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise LookupServiceError(
            f"cannot make the socket directory {directory}: {error}"
        ) from error
    check_private(directory)


def is_listened_on(path: Path) -> bool:
    """Somebody listens on a socket; also if whoever it is takes no connection now."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(STALE_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def remove_stale_sockets(directory: Path) -> int:
    """Remove sockets that killed workers left behind; returns how many there were.

    One that nobody listens on is stale if it is older than :data:`STALE_AFTER_S`.
    """
    num_removed = 0
    for path in (*directory.glob("*.sock"), *directory.glob("*.ranks")):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= STALE_AFTER_S and not is_listened_on(path):
                path.unlink()
                num_removed += 1
    return num_removed


def check_private(directory: Path) -> None:
    """Check that only this user can enter ``directory``.

    Raises:
        LookupServiceError: it is missing, a link, belongs to somebody else, or others may enter it.
    """
    try:
        info = directory.lstat()
    except OSError as error:
        raise LookupServiceError(f"no socket directory {directory}: {error}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise LookupServiceError(
            f"{directory} must be a directory that only user {os.getuid()} can enter (mode 0700)"
        )


logger = logging.getLogger(__name__)

#: How often a worker that is down is probed.
PROBE_INTERVAL_S = 1.0

#: Questions that wait for a worker that does not read; more are not asked.
SEND_QUEUE = 1000

#: Ends of leases that wait for room in it; beyond that, the oldest leases end at their deadline.
MAX_UNSENT = 10_000


class Workers:
    """Sends to ranks and receives from them.

    Attributes:
        failures: answers that did not come, by cause.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Connect, without waiting for anybody.

        Args:
            paths: the workers' Unix sockets, by rank.
        """
        self.failures: Counter[str] = Counter()
        self._seq = itertools.count(1)
        self._down: dict[int, float] = {}  # rank -> time of the last probe
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._unsent: list[deque[Keep | Unpin]] = [deque(maxlen=MAX_UNSENT) for _ in paths]
        for path in paths:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            socket.connect(f"ipc://{path}")
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)

    def __len__(self) -> int:
        """Number of ranks."""
        return len(self._sockets)

    def next_seq(self) -> int:
        """The number of the next question."""
        return next(self._seq)

    def is_down(self, rank: int) -> bool:
        """The worker missed a deadline and has not answered since."""
        return rank in self._down

    def mark_down(self, rank: int, timeout_s: float) -> None:
        """The worker has not answered within ``timeout_s``."""
        if rank not in self._down:
            logger.warning(
                "lookup server of rank %d did not answer within %g s; until it does, all misses",
                rank,
                timeout_s,
            )
            self._down[rank] = time.monotonic()

    def probe(self) -> bool:
        """Ask who is down, without waiting; True if nobody is."""
        now = time.monotonic()
        for rank, probed in list(self._down.items()):
            if now - probed >= PROBE_INTERVAL_S:
                self._down[rank] = now
                self.send(rank, Hello(self.next_seq(), PROTOCOL))
        return not self._down

    def receive(self, timeout_s: float) -> list[tuple[int, Reply]]:
        """What has arrived, waiting up to ``timeout_s`` for the first. Whoever answers is up."""
        for rank in range(len(self._sockets)):
            self._send_unsent(rank)
        ready = dict(self._poller.poll(int(timeout_s * 1000 + 0.999)))
        arrived: list[tuple[int, Reply]] = []
        for rank, channel in enumerate(self._sockets):
            if channel not in ready:
                continue
            try:
                arrived.append((rank, decode_reply(channel.recv(zmq.NOBLOCK))))
            except (LookupServiceError, zmq.Again) as error:
                self.failures["error"] += 1
                logger.warning("rank %d sent no answer of this protocol: %s", rank, error)
                continue
            if self._down.pop(rank, None) is not None:
                logger.info("lookup server of rank %d answers again", rank)
        return arrived

    def send_all(self, message: Request) -> None:
        """Queue a message for every rank."""
        for rank in range(len(self._sockets)):
            self.send(rank, message)

    def send(self, rank: int, message: Request) -> bool:
        """Queue a message; False if the worker's queue is full.

        The end of a lease is kept then, and sent before anything else once there is room: without
        it the lease would stay until its deadline.
        """
        self._send_unsent(rank)
        if not self._unsent[rank] and self._try_send(rank, message):
            return True
        self.failures["full"] += 1
        if isinstance(message, Keep | Unpin):
            self._unsent[rank].append(message)
        return False

    def _send_unsent(self, rank: int) -> None:
        unsent = self._unsent[rank]
        while unsent and self._try_send(rank, unsent[0]):
            unsent.popleft()

    def _try_send(self, rank: int, message: Request) -> bool:
        try:
            self._sockets[rank].send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)
