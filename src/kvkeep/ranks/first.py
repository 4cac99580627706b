"""FirstRank: rank 0's side of a group. It opens the rounds, collects, decides and tells.

The others connect to it. One that is late or breaks the protocol is disconnected, and no round
succeeds before it has connected anew, so a dead rank costs one timeout and not one per load.
Callable from any thread; a round, or a look at the connections, takes its turn.

Verdicts: the one place where the outcome of a round is decided, by whoever comes first.

A message can be late, and a process can be stopped between reading the clock and acting on it, so
no exchange of messages lets all ranks agree. A symbolic link can: the system makes it whole or not
at all, with its content, and for one of those who try. Its name is the round, its target the
outcome. Callable from any thread and process of one machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch

from kvkeep.errors import RankError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import MemoryObj
from kvkeep.metrics import Metrics
from kvkeep.ranks.base import (
    OTHER_RANKS,
    PROTOCOL,
    Channel,
    Done,
    Join,
    Message,
    Plan,
    RankGroup,
    RankOptions,
    Round,
    Verdict,
    Welcome,
)

#: Digits of the largest outcome that is believed.
_MAX_DIGITS = 18


class Verdicts:
    """The outcomes of one session's rounds."""

    def __init__(self, directory: Path, session: str) -> None:
        """Decide in ``directory``, which exists.

        Args:
            directory: private to the user, on a file system of this machine.
            session: names the life of the rank 0 that counts the rounds.
        """
        self._directory = directory
        self._session = session
        self._forgotten = 0

    def decide(self, seq: int, written: int) -> int:
        """The outcome of round ``seq``: ``written``, unless another one stands already.

        A directory that cannot be written decides nothing: the outcome is 0 then.
        """
        path = self._path(seq)
        with contextlib.suppress(OSError):
            os.symlink(str(written), path)
            return written
        return self.read(seq) or 0

    def read(self, seq: int) -> int | None:
        """The outcome of round ``seq`` if it stands already."""
        try:
            text = os.readlink(self._path(seq))
        except OSError:
            return None
        if not text.isascii() or not text.isdecimal() or len(text) > _MAX_DIGITS:
            return 0
        return int(text)

    def forget_before(self, seq: int) -> None:
        """Remove the outcomes of earlier rounds, which every rank knows by now."""
        for number in range(self._forgotten, seq):
            with contextlib.suppress(OSError):
                self._path(number).unlink()
        self._forgotten = max(self._forgotten, seq)

    def _path(self, seq: int) -> Path:
        return self._directory / f"{self._session}-{seq}"


def make_directory(directory: Path) -> None:
    """Make the directory of the verdicts anew, without what a killed rank 0 left in it.

    Raises:
        RankError: it cannot be made, or belongs to somebody else.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        info = directory.lstat()
        if not directory.is_dir() or directory.is_symlink() or info.st_uid != os.getuid():
            raise RankError(f"{directory} is no directory of user {os.getuid()}")
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RankError(f"cannot make the directory {directory}: {error}") from error


def remove_directory(directory: Path) -> None:
    """Remove the directory and the verdicts in it, as far as that is possible."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()


#: A connection that has not said by then who it is is closed.
JOIN_TIMEOUT_S = 5.0
#: How long :meth:`FirstRank.close` waits for a round that is under way, beyond its timeout.
_CLOSE_MARGIN_S = 1.0

_VERDICTS = ".verdicts"

_log = logging.getLogger(__name__)


def verdict_directory(path: Path) -> Path:
    """Where a group's verdicts stand, from the path of its socket."""
    return path.with_name(path.name + _VERDICTS)


def _remove_abandoned(directory: Path) -> None:
    """Remove verdicts of killed engines, whose sockets are gone. Sockets are bound first."""
    for path in directory.glob("*" + _VERDICTS):
        if not path.with_name(path.name.removesuffix(_VERDICTS)).exists():
            remove_directory(path)


class FirstRank(RankGroup):
    """Rank 0."""

    is_first = True

    def __init__(self, options: RankOptions, *, metrics: Metrics, arena: Arena | None) -> None:
        """Listen for the others.

        Args:
            options: the group.
            metrics: where failures of other ranks are counted.
            arena: the memory of the pool, shareable; None where each rank has chunks of its own.

        Raises:
            RankError: the socket cannot be bound, or the pool cannot be shared.
        """
        if options.shares_kv and (arena is None or arena.fileno is None):
            raise RankError("rank 0's pool is in no memory that other ranks can map")
        self.shares_kv = options.shares_kv
        self._options = options
        self._metrics = metrics
        self._arena = arena
        self._listener = _listen(options.socket)
        self._directory = verdict_directory(options.socket)
        try:
            _remove_abandoned(options.socket.parent)
            make_directory(self._directory)
        except BaseException:
            self._listener.close()
            raise
        self._session = uuid.uuid4().hex
        self._verdicts = Verdicts(self._directory, self._session)
        self._turn = threading.Lock()
        self._seq = 0  # guarded by _turn, as is the rest
        self._peers: dict[int, Channel] = {}
        self._pending: list[tuple[Channel, float]] = []  # who has not joined yet, until when
        self._closed = False

    def is_whole(self) -> bool:
        """See :meth:`RankGroup.is_whole`; lets in who has come."""
        self.tend()
        return not self._closed and len(self._peers) == self._options.num_ranks - 1

    def tend(self) -> None:
        """See :meth:`RankGroup.tend`; not while a round is under way, which does so itself."""
        if self._turn.acquire(blocking=False):
            try:
                self._tend_locked()
            finally:
                self._turn.release()

    def open_round(self, tag: bytes, offered: Sequence[MemoryObj] = ()) -> Round | None:
        """See :meth:`RankGroup.open_round`."""
        if not self._turn.acquire(timeout=self._options.timeout_s):
            self._metrics.failure(OTHER_RANKS, "load", "busy")
            return None
        try:
            self._tend_locked()
            self._seq += 1
            if self._closed or len(self._peers) < self._options.num_ranks - 1:
                self._metrics.failure(OTHER_RANKS, "load", "not_whole")
                refused = True
            else:
                self._verdicts.forget_before(self._seq)  # who takes part knows all before
                refused = self.shares_kv and not offered
            if refused:
                self._send_all_locked(Plan(self._seq, tag, refused=True))
                self._turn.release()
                return None
            round_ = _FirstRound(self, self._seq, tag)
            if self.shares_kv:
                self._send_all_locked(Plan(self._seq, tag, places=self._places(offered)))
            return round_
        except BaseException as error:
            for rank in list(self._peers):
                self._drop_locked(rank, "raised", error)
            self._turn.release()
            raise

    def close(self) -> None:
        """See :meth:`RankGroup.close`; waits for a round that is under way."""
        has_turn = self._turn.acquire(timeout=self._options.timeout_s + _CLOSE_MARGIN_S)
        try:
            if self._closed:
                return
            self._closed = True
            self._listener.close()
            for channel in [*self._peers.values(), *(channel for channel, _ in self._pending)]:
                channel.close()
            self._peers.clear()
            self._pending.clear()
            with contextlib.suppress(OSError):
                self._options.socket.unlink()
            remove_directory(self._directory)
        finally:
            if has_turn:
                self._turn.release()

    # -- used by a round, which has the turn ------------------------------------------------------

    def settle(self, seq: int, tag: bytes, written: int) -> int:
        """Collect what the others have written, decide, tell, and end the turn."""
        try:
            if not self.shares_kv:  # each has loaded its own, and the round begins now
                self._send_all_locked(Plan(seq, tag, refused=not written))
            elif not written:
                self._send_all_locked(Verdict(seq, self._verdicts.decide(seq, 0)))
            if not written:
                return 0
            outcome = self._verdicts.decide(seq, self._collect_locked(seq, written))
            self._send_all_locked(Verdict(seq, outcome))
            return outcome
        except BaseException as error:
            for rank in list(self._peers):  # or they would wait
                self._drop_locked(rank, "raised", error)
            raise
        finally:
            self._turn.release()

    def _collect_locked(self, seq: int, written: int) -> int:
        """The least that any rank has written; 0 if one does not say so in time."""
        deadline = time.monotonic() + self._options.timeout_s
        waiting = set(self._peers)
        if len(waiting) < self._options.num_ranks - 1:
            return 0
        poller = select.poll()
        ranks = {}
        for rank, channel in self._peers.items():
            poller.register(channel, select.POLLIN)
            ranks[channel.fileno()] = rank
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            ready = poller.poll(left_s * 1000)
            for fd, _ in ready:
                done = self._done_of_locked(ranks[fd], seq)
                if done is None:
                    continue
                if done < 1:
                    return 0
                written = min(written, done)
                waiting.discard(ranks[fd])
            if not ready and left_s <= 0:
                for rank in waiting:
                    self._drop_locked(rank, "timeout")
                return 0
        return written

    def _done_of_locked(self, rank: int, seq: int) -> int | None:
        """What ``rank`` says it has written in this round; None if it does not say yet."""
        channel = self._peers[rank]
        try:
            while (message := channel.receive(0.0)) is not None:
                done = _as_done(message)
                if done.seq == seq:
                    return done.written
        except RankError as error:
            self._drop_locked(rank, "gone", error)
            return 0
        return None

    # -- connections ------------------------------------------------------------------------------

    def _send_all_locked(self, message: Message) -> None:
        deadline = time.monotonic() + self._options.timeout_s
        for rank, channel in list(self._peers.items()):
            try:
                channel.send(message, deadline)
            except RankError as error:
                self._drop_locked(rank, "gone", error)

    def _tend_locked(self) -> None:
        """Let go of who has gone, let in who has come. Does not wait."""
        if self._closed:
            return
        for rank in list(self._peers):
            self._done_of_locked(rank, -1)  # reads what came too late
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._pending.append((Channel(sock), time.monotonic() + JOIN_TIMEOUT_S))
        still_pending = []
        for channel, until in self._pending:
            if not self._admit_locked(channel, until):
                still_pending.append((channel, until))
        self._pending = still_pending

    def _admit_locked(self, channel: Channel, until: float) -> bool:
        """Let a rank in, or send it away; False if it has not said yet who it is."""
        options = self._options
        try:
            message = channel.receive(0.0)
            if message is None and time.monotonic() < until:
                return False
            if (
                not isinstance(message, Join)
                or (message.protocol, message.num_ranks) != (PROTOCOL, options.num_ranks)
                or message.identity != options.identity
                or not 0 < message.rank < options.num_ranks
            ):
                raise RankError(f"no rank of this engine: {message}")
            arena = self._arena
            fd = arena.fileno if arena is not None and self.shares_kv else None
            size = arena.size_bytes if arena is not None and fd is not None else 0
            deadline = time.monotonic() + options.timeout_s
            channel.send(Welcome(self._session, size), deadline, fd=fd)
        except RankError as error:
            self._metrics.failure(OTHER_RANKS, "join", "refused")
            _log.warning("a connection was refused: %s", error)
            channel.close()
            return True
        earlier = self._peers.pop(message.rank, None)
        if earlier is not None:
            earlier.close()
        self._peers[message.rank] = channel
        _log.info("rank %d takes part", message.rank)
        return True

    def _drop_locked(self, rank: int, cause: str, error: BaseException | None = None) -> None:
        channel = self._peers.pop(rank, None)
        if channel is not None:
            channel.close()
            self._metrics.failure(OTHER_RANKS, "load", cause)
            _log.warning(
                "rank %d is left out until it is back: %s", rank, error or f"{cause} in a load"
            )

    def _places(self, offered: Sequence[MemoryObj]) -> tuple[tuple[int, int], ...]:
        arena = self._arena
        if arena is None:
            return ()
        return tuple((arena.offset_of(obj.array), obj.size_bytes) for obj in offered)


class _FirstRound(Round):
    """A round that rank 0 has opened; it has the turn."""

    def __init__(self, group: FirstRank, seq: int, tag: bytes) -> None:
        self._group = group
        self._seq = seq
        self._tag = tag
        self._is_over = False

    @property
    def num_offered(self) -> int:
        """Nothing is offered to rank 0."""
        return 0

    def borrow(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat
    ) -> MemoryObj | None:
        """Rank 0 borrows nothing."""
        return None

    def conclude(self, written: int) -> int:
        """See :meth:`Round.conclude`."""
        if self._is_over:
            return 0
        self._is_over = True
        return self._group.settle(self._seq, self._tag, written)

    def abort(self) -> None:
        """See :meth:`Round.abort`."""
        self.conclude(0)


def _as_done(message: Message) -> Done:
    if not isinstance(message, Done):
        raise RankError(f"a rank sent {type(message).__name__} to rank 0")
    return message


def _listen(path: Path) -> socket.socket:
    """A listening socket at ``path``, in place of one that a killed process left.

    Raises:
        RankError: it cannot be bound, or a living process listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            other = Channel.connect(str(path))
            if other is not None:
                other.close()
                raise RankError(f"another engine's rank 0 listens at {path}")
            path.unlink()
        sock.setblocking(False)
        sock.bind(str(path))
        sock.listen()
    except OSError as error:
        sock.close()
        raise RankError(f"cannot bind the ranks' socket {path}: {error}") from error
    except RankError:
        sock.close()
        raise
    return sock
