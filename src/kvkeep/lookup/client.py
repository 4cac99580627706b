"""LookupClient: asks, inside the scheduler's process, what every worker has stored.

Callable from any thread; calls wait for each other. It asks in two forms. ``lookup`` waits for the
answers, with a deadline. ``start`` does not: ``poll`` says "not yet" until every worker has brought
what it found into memory, or a deadline has passed. In both forms the answer is the minimum over
the workers, what a worker holds beyond it is given back, and a lookup without an answer is a miss
that leaves nothing pinned, however late answers arrive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from kvkeep.errors import LookupServiceError
from kvkeep.keys import TOKEN_BYTES
from kvkeep.lookup.messages import (
    PROTOCOL,
    Check,
    CheckReply,
    Clear,
    ClearReply,
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
    Unpin,
    WireScope,
)
from kvkeep.lookup.pending import Outcome, shortest
from kvkeep.lookup.started import StartedLookups
from kvkeep.lookup.tally import Tally
from kvkeep.lookup.workers import Workers
from kvkeep.results import FoundTokens
from kvkeep.tokens import PLAIN, RequestScope, as_token_bytes

logger = logging.getLogger(__name__)

R = TypeVar("R", HelloReply, CheckReply, NumbersReply, ClearReply)


class LookupClient:
    """Asks all workers (ranks) of one engine."""

    def __init__(
        self, paths: Sequence[Path], *, timeout_s: float, prefetch_timeout_s: float = 0.0
    ) -> None:
        """Connect, without waiting for anybody.

        Args:
            paths: the workers' Unix sockets, by rank.
            timeout_s: deadline of every question.
            prefetch_timeout_s: how long workers take at most to bring chunks into memory; what is
                started has so much more time.

        Raises:
            ValueError: there are no paths, or a deadline is not positive.
        """
        if not paths or timeout_s <= 0 or prefetch_timeout_s < 0:
            raise ValueError(
                f"a lookup client needs paths and a deadline, got {paths}, {timeout_s}"
            )
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False  # guarded by _lock
        self._tallies = [Tally() for _ in paths]  # by rank; guarded by _lock
        self._workers = Workers(paths)  # guarded by _lock
        self._started = StartedLookups(  # guarded by _lock
            self._workers, timeout_s=timeout_s, prefetch_timeout_s=prefetch_timeout_s
        )

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
            that was found stays pinned beyond it, late answers included.
        """
        data = tokens if isinstance(tokens, bytes) else as_token_bytes(tokens)
        with self._lock:
            if self._closed or not self._all_up_locked():
                self._workers.failures["down"] += 1
                outcome = Outcome(FoundTokens(), "down")
            else:
                seq = self._workers.next_seq()
                question = Lookup(seq, lookup_id, data, WireScope.of(scope), pin)
                replies = self._ask_locked(question, self._timeout_s)
                outcome = shortest(replies)
                if pin:
                    self._give_back_locked(lookup_id, outcome.found, dict(enumerate(replies)))
            if counted and not self._closed:
                self._count_lookup_locked(len(data) // TOKEN_BYTES, outcome)
            return outcome.found

    def start(self, lookup_id: str, tokens: object, *, scope: RequestScope = PLAIN) -> None:
        """Ask for the same, pinned, without waiting; :meth:`poll` has the answer.

        The workers bring what they find in slow tiers into memory before they answer. It is no part
        of the hit rate until it is counted, see :meth:`count`. The arguments are those of
        :meth:`lookup`.
        """
        data = tokens if isinstance(tokens, bytes) else as_token_bytes(tokens)
        with self._lock:
            is_up = not self._closed and self._all_up_locked()
            self._started.start(lookup_id, data, scope, is_up=is_up)

    def poll(self, lookup_id: str) -> Outcome | None:
        """What was started came to: tokens as :meth:`lookup` gives them, or None: not yet.

        It is told once; of an unknown id, or when the client is closed, it is nothing.
        """
        with self._lock:
            if self._closed or not self._started.is_known(lookup_id):
                return Outcome(FoundTokens(), "down" if self._closed else "")
            ended = self._started.poll(lookup_id)
            if ended is None:
                return None
            pending, outcome = ended
            self._give_back_locked(lookup_id, outcome.found, pending.replies)
            return outcome

    def count(self, num_asked: int, outcome: Outcome) -> None:
        """Make what was started for a prompt of ``num_asked`` tokens a part of the hit rate."""
        with self._lock:
            if not self._closed:
                self._count_lookup_locked(num_asked, outcome)

    def wait(self, timeout_s: float) -> None:
        """Wait until a worker says something, at most ``timeout_s``.

        Returns at once where nothing that was started is under way.
        """
        with self._lock:
            if not self._closed:
                self._started.wait(timeout_s)

    @property
    def num_started(self) -> int:
        """Lookups that were started and have not been answered."""
        with self._lock:
            return len(self._started)

    def unpin(self, lookup_ids: Sequence[str]) -> None:
        """Give lookups up and end their leases, without waiting; unknown ones are ignored."""
        with self._lock:
            for lookup_id in lookup_ids:
                self._started.forget(lookup_id)
            if lookup_ids and not self._closed:
                self._workers.send_all(Unpin(self._workers.next_seq(), tuple(lookup_ids)))

    def hello(self, *, timeout_s: float | None = None) -> list[HelloReply]:
        """What every worker says about itself, by rank.

        Args:
            timeout_s: deadline of this question; None for the usual one.

        Raises:
            LookupServiceError: one did not answer in time or speaks another protocol.
        """
        return self._ask_strictly(Hello(self._next_seq(), PROTOCOL), HelloReply, timeout_s)

    def check(self) -> list[CheckReply]:
        """What every worker holds, by rank.

        Raises:
            LookupServiceError: one did not answer in time.
        """
        return self._ask_strictly(Check(self._next_seq()), CheckReply)

    def numbers(self) -> list[Mapping[str, float]]:
        """What every worker counts, by rank: the values of its metrics.

        Raises:
            LookupServiceError: one did not answer in time.
        """
        replies = self._ask_strictly(Numbers(self._next_seq()), NumbersReply)
        return [reply.metrics for reply in replies]

    def clear(self, locations: Collection[str] = ()) -> int:
        """Remove every chunk of every worker; returns how many copies there were.

        Args:
            locations: names of the tiers; all if empty.

        Raises:
            LookupServiceError: one did not answer in time, and goes on with it, or has no tier of
                that name.
        """
        replies = self._ask_strictly(Clear(self._next_seq(), tuple(locations)), ClearReply)
        return sum(reply.num_chunks for reply in replies)

    @property
    def failures(self) -> Mapping[str, int]:
        """Lookups that were misses for want of an answer, by cause: timeout, down, error, full."""
        with self._lock:
            return dict(self._workers.failures)

    def close(self) -> None:
        """Close the sockets; later lookups are misses. A second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._workers.close()

    def _next_seq(self) -> int:
        with self._lock:
            return self._workers.next_seq()

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
        workers = self._workers
        deadline = time.monotonic() + timeout_s
        waiting = {rank for rank in range(len(workers)) if workers.send(rank, question)}
        replies: list[Reply | None] = [None] * len(workers)
        while waiting:
            left_s = deadline - time.monotonic()
            arrived = workers.receive(max(left_s, 0.0))
            self._started.note(arrived)
            for rank, reply in arrived:
                if reply.seq == question.seq and rank in waiting:
                    replies[rank] = reply
                    waiting.discard(rank)
            if left_s <= 0:
                break
        for rank, answer in enumerate(replies):
            if answer is None:
                workers.failures["timeout"] += 1
                if not isinstance(question, Clear):  # takes as long as the slowest tier does
                    workers.mark_down(rank, self._timeout_s)
            elif isinstance(answer, ErrorReply):
                workers.failures["error"] += 1
                logger.warning("lookup on rank %d failed: %s", rank, answer.message)
        return replies

    def _all_up_locked(self) -> bool:
        """No worker is down. Reads what arrived late and probes who is, without waiting."""
        if not any(map(self._workers.is_down, range(len(self._workers)))):
            return True
        while self._started.note(self._workers.receive(0.0)):
            pass
        return self._workers.probe()

    def _give_back_locked(
        self, lookup_id: str, found: int, replies: Mapping[int, Reply | None]
    ) -> None:
        """End what workers hold beyond the answer: all of it, or what others do not have."""
        workers = self._workers
        if found == 0:
            workers.send_all(Unpin(workers.next_seq(), (lookup_id,)))
            return
        for rank, reply in replies.items():
            if isinstance(reply, LookupReply) and reply.found > found:
                workers.send(rank, Keep(workers.next_seq(), lookup_id, int(found)))

    def _count_lookup_locked(self, asked: int, outcome: Outcome) -> None:
        """Tell the workers what a lookup came to; one that is down hears it when it is back."""
        workers = self._workers
        for rank, tally in enumerate(self._tallies):
            if outcome.cause:
                tally.failed(asked, outcome.cause)
            else:
                tally.answered(asked, outcome.found.tiers)
            message = None if workers.is_down(rank) else tally.take(workers.next_seq())
            if message is not None:
                workers.send(rank, message)
