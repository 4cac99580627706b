"""LookupClient: asks, inside the scheduler's process, what every worker has stored.

Callable from any thread; calls wait for each other. Every question has a deadline, after which it
is a miss. A worker that missed one is down: it is not waited for again until it has answered
something, and a probe that nobody waits for finds that out. So a dead worker costs one deadline,
not one per request.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import zmq

from kvkeep.errors import LookupServiceError
from kvkeep.keys import TOKEN_BYTES
from kvkeep.lookup.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Check,
    CheckReply,
    Clear,
    ClearReply,
    ErrorReply,
    Hello,
    HelloReply,
    Lookup,
    LookupReply,
    Reply,
    Request,
    Unpin,
    WireScope,
    decode_reply,
    encode,
)
from kvkeep.lookup.tally import Tally
from kvkeep.results import FoundTokens
from kvkeep.tokens import PLAIN, RequestScope, as_token_bytes

logger = logging.getLogger(__name__)

R = TypeVar("R", HelloReply, CheckReply, ClearReply)

#: How often a worker that is down is probed.
PROBE_INTERVAL_S = 1.0

#: Questions that wait for a worker that does not read; more are not asked.
SEND_QUEUE = 1000


class LookupClient:
    """Asks all workers (ranks) of one engine."""

    def __init__(self, paths: Sequence[Path], *, timeout_s: float) -> None:
        """Connect, without waiting for anybody.

        Args:
            paths: the workers' Unix sockets, by rank.
            timeout_s: deadline of every question.

        Raises:
            ValueError: there are no paths, or the deadline is not positive.
        """
        if not paths or timeout_s <= 0:
            raise ValueError(
                f"a lookup client needs paths and a deadline, got {paths}, {timeout_s}"
            )
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._seq = itertools.count(1)
        self._failures: Counter[str] = Counter()  # guarded by _lock
        self._down: dict[int, float] = {}  # rank -> time of the last probe; guarded by _lock
        self._closed = False  # guarded by _lock
        self._tallies = [Tally() for _ in paths]  # by rank; guarded by _lock
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []  # guarded by _lock
        self._poller = zmq.Poller()  # guarded by _lock
        for path in paths:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            socket.connect(f"ipc://{path}")
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)

    def lookup(
        self,
        lookup_id: str,
        tokens: object,
        *,
        scope: RequestScope = PLAIN,
        pin: bool = True,
        counted: bool = True,
    ) -> FoundTokens:
        """Tokens of the longest prefix that every worker has stored.

        Args:
            lookup_id: names the leases that the answer opens, one per worker; use each id once.
            tokens: token ids, see :func:`kvkeep.tokens.as_token_bytes`, or their bytes.
            scope: what the request adds to the identity.
            pin: what is found must stay until :meth:`unpin`, a retrieve or the lease's deadline.
            counted: part of the hit rate; False where a waiting request is asked about again.

        Returns:
            The minimum over the workers; 0 if one failed, is down or missed the deadline. Nothing
            that was found stays pinned when the answer is 0, late answers included.
        """
        data = tokens if isinstance(tokens, bytes) else as_token_bytes(tokens)
        with self._lock:
            if self._closed or not self._all_up_locked():
                self._failures["down"] += 1
                found, cause = FoundTokens(), "down"
            else:
                question = Lookup(next(self._seq), lookup_id, data, WireScope.of(scope), pin)
                replies = self._ask_locked(question, self._timeout_s)
                found, cause = _shortest(replies)
                if pin and found == 0:
                    self._send_all_locked(Unpin(next(self._seq), (lookup_id,)))
            if counted and not self._closed:
                self._count_lookup_locked(len(data) // TOKEN_BYTES, found, cause)
            return found

    def unpin(self, lookup_ids: Sequence[str]) -> None:
        """End the leases of lookups, without waiting; unknown ones are ignored."""
        with self._lock:
            if lookup_ids and not self._closed:
                self._send_all_locked(Unpin(next(self._seq), tuple(lookup_ids)))

    def hello(self, *, timeout_s: float | None = None) -> list[HelloReply]:
        """What every worker says about itself, by rank.

        Args:
            timeout_s: deadline of this question; None for the usual one.

        Raises:
            LookupServiceError: one did not answer in time or speaks another protocol.
        """
        return self._ask_strictly(Hello(next(self._seq), PROTOCOL), HelloReply, timeout_s)

    def check(self) -> list[CheckReply]:
        """What every worker holds, by rank.

        Raises:
            LookupServiceError: one did not answer in time.
        """
        return self._ask_strictly(Check(next(self._seq)), CheckReply)

    def clear(self, locations: Collection[str] = ()) -> int:
        """Remove every chunk of every worker; returns how many copies there were.

        Args:
            locations: names of the tiers; all if empty.

        Raises:
            LookupServiceError: one did not answer in time, or has no tier of that name.
        """
        replies = self._ask_strictly(Clear(next(self._seq), tuple(locations)), ClearReply)
        return sum(reply.num_chunks for reply in replies)

    @property
    def failures(self) -> Mapping[str, int]:
        """Lookups that were misses for want of an answer, by cause: timeout, down, error, full."""
        with self._lock:
            return dict(self._failures)

    def close(self) -> None:
        """Close the sockets; later lookups are misses. A second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._context.destroy(linger=0)

    def _ask_strictly(
        self, question: Request, kind: type[R], timeout_s: float | None = None
    ) -> list[R]:
        with self._lock:
            if self._closed:
                raise LookupServiceError("the lookup client is closed")
            replies = self._ask_locked(question, timeout_s or self._timeout_s)
        answers: list[R] = []
        for rank, reply in enumerate(replies):
            if not isinstance(reply, kind):
                why = reply.message if isinstance(reply, ErrorReply) else "no answer in time"
                raise LookupServiceError(
                    f"rank {rank} failed to answer {type(question).__name__}: {why}"
                )
            answers.append(reply)
        return answers

    def _ask_locked(self, question: Request, timeout_s: float) -> list[Reply | None]:
        """Send to every worker and wait for the answers until the deadline; None for none."""
        deadline = time.monotonic() + timeout_s
        waiting = {rank for rank in range(len(self._sockets)) if self._send_locked(rank, question)}
        replies: list[Reply | None] = [None] * len(self._sockets)
        while waiting:
            left_s = deadline - time.monotonic()
            for rank, reply in self._receive_locked(max(left_s, 0.0)):
                if reply.seq == question.seq and rank in waiting:
                    replies[rank] = reply
                    waiting.discard(rank)
            if left_s <= 0:
                break
        self._count_locked(replies)
        return replies

    def _count_lookup_locked(self, asked: int, found: FoundTokens, cause: str) -> None:
        """Tell the workers what a lookup came to; one that is down hears it when it is back."""
        for rank, tally in enumerate(self._tallies):
            if cause:
                tally.failed(asked, cause)
            else:
                tally.answered(asked, found.tiers)
            if rank not in self._down:
                message = tally.take(next(self._seq))
                if message is not None:
                    self._send_locked(rank, message)

    def _count_locked(self, replies: Sequence[Reply | None]) -> None:
        for rank, reply in enumerate(replies):
            if reply is None:
                self._failures["timeout"] += 1
                self._mark_down_locked(rank)
            elif isinstance(reply, ErrorReply):
                self._failures["error"] += 1
                logger.warning("lookup on rank %d failed: %s", rank, reply.message)

    def _receive_locked(self, timeout_s: float) -> list[tuple[int, Reply]]:
        """What has arrived, waiting up to ``timeout_s`` for the first. Whoever answers is up."""
        ready = dict(self._poller.poll(int(timeout_s * 1000 + 0.999)))
        arrived: list[tuple[int, Reply]] = []
        for rank, socket in enumerate(self._sockets):
            if socket not in ready:
                continue
            try:
                arrived.append((rank, decode_reply(socket.recv(zmq.NOBLOCK))))
            except (LookupServiceError, zmq.Again) as error:
                self._failures["error"] += 1
                logger.warning("rank %d sent no answer of this protocol: %s", rank, error)
                continue
            if self._down.pop(rank, None) is not None:
                logger.info("lookup server of rank %d answers again", rank)
        return arrived

    def _all_up_locked(self) -> bool:
        """No worker is down. Reads what arrived late and probes who is, without waiting."""
        if not self._down:
            return True
        while self._receive_locked(0.0):
            pass
        now = time.monotonic()
        for rank, probed in list(self._down.items()):
            if now - probed >= PROBE_INTERVAL_S:
                self._down[rank] = now
                self._send_locked(rank, Hello(next(self._seq), PROTOCOL))
        return not self._down

    def _mark_down_locked(self, rank: int) -> None:
        if rank not in self._down:
            logger.warning(
                "lookup server of rank %d did not answer within %g s; until it does, all misses",
                rank,
                self._timeout_s,
            )
            self._down[rank] = time.monotonic()

    def _send_all_locked(self, message: Request) -> None:
        for rank in range(len(self._sockets)):
            self._send_locked(rank, message)

    def _send_locked(self, rank: int, message: Request) -> bool:
        """Queue a message; False if the worker's queue is full."""
        try:
            self._sockets[rank].send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._failures["full"] += 1
            return False
        return True


def _shortest(replies: Sequence[Reply | None]) -> tuple[FoundTokens, str]:
    """What every worker has found, and why that is nothing if one has not answered."""
    found: list[FoundTokens] = []
    for reply in replies:
        if reply is None:
            return FoundTokens(), "timeout"
        if not isinstance(reply, LookupReply):
            return FoundTokens(), "error"
        known = FoundTokens(reply.tiers)
        found.append(known if known == reply.found else FoundTokens([("unknown", reply.found)]))
    return min(found), ""
