"""LookupClient: asks, inside the scheduler's process, what every worker has stored.

Callable from any thread; calls wait for each other. It asks in two forms. ``lookup`` waits for the
answers, with a deadline. ``start`` does not: ``poll`` says "not yet" until every worker has brought
what it found into memory, or a deadline has passed. In both forms the answer is the minimum over
the workers, what a worker holds beyond it is given back, and a lookup without an answer is a miss
that leaves nothing pinned, however late answers arrive.

PendingLookup: a lookup whose answers are on their way, and what they come to.

Pure bookkeeping: who has answered what by when; nothing is sent here. Used with the client's lock
held.

StartedLookups: lookups that nobody waits for, from the question to the last answer.

Used with the client's lock held.

HitCounters: what lookups came to, as the scheduler knows it, on its way to the workers' metrics.

A worker knows what it found, not whether its answer came in time nor what the other ranks had. So
the client counts, and the workers hear of it. Used with the client's lock held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvkeep.engine.results import FoundTokens
from kvkeep.errors import LookupServiceError
from kvkeep.hashing import TOKEN_BYTES
from kvkeep.lookup.protocol import (
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
    WireScope,
)
from kvkeep.lookup.sockets import Workers
from kvkeep.tokens import PLAIN, RequestScope, as_token_bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a lookup came to.

    Attributes:
        found: tokens that every worker has.
        cause: why that is nothing, if answers are missing: timeout, down, error or full; else "".
        silent: ranks that have not said a word by their deadline.
    """

    found: FoundTokens
    cause: str = ""
    silent: tuple[int, ...] = ()


def shortest(replies: Sequence[Reply | None]) -> Outcome:
    """The minimum over the workers' answers; nothing if one is missing or an error."""
    found: list[FoundTokens] = []
    for reply in replies:
        if reply is None:
            return Outcome(FoundTokens(), "timeout")
        if not isinstance(reply, LookupReply):
            return Outcome(FoundTokens(), "error")
        found.append(found_of(reply))
    return Outcome(min(found))


def found_of(reply: LookupReply) -> FoundTokens:
    """What one worker has found, and where, if it says that."""
    known = FoundTokens(reply.tiers)
    return known if known == reply.found else FoundTokens([("unknown", reply.found)])


@dataclass(slots=True)
class PendingLookup:
    """One lookup under way.

    Attributes:
        lookup_id: names it.
        seq: number of the question.
        num_ranks: workers that are asked.
        word_deadline: value of ``time.monotonic()`` by which every worker has said something.
        deadline: by which every worker has answered.
        replies: answers by rank.
        started: ranks that said "not yet".
        refused: why it was not asked: down or full; else "".
    """

    lookup_id: str
    seq: int
    num_ranks: int
    word_deadline: float
    deadline: float
    refused: str = ""
    replies: dict[int, LookupReply | ErrorReply] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)

    def note(self, rank: int, reply: Reply) -> None:
        """A worker has answered this question."""
        if isinstance(reply, Started):
            self.started.add(rank)
        elif isinstance(reply, LookupReply | ErrorReply):
            self.replies.setdefault(rank, reply)

    def outcome(self, now: float, is_down: Callable[[int], bool]) -> Outcome | None:
        """What it came to; None: not yet."""
        if self.refused:
            return Outcome(FoundTokens(), self.refused)
        if any(isinstance(reply, ErrorReply) for reply in self.replies.values()):
            return Outcome(FoundTokens(), "error")
        missing = [rank for rank in range(self.num_ranks) if rank not in self.replies]
        if not missing:
            return shortest([self.replies[rank] for rank in range(self.num_ranks)])
        silent = [rank for rank in missing if rank not in self.started]
        if now < self.word_deadline:
            silent = []
        if silent or now >= self.deadline:
            return Outcome(FoundTokens(), "timeout", tuple(silent))
        return Outcome(FoundTokens(), "down") if any(map(is_down, missing)) else None


class StartedLookups:
    """Questions under way, by lookup id and by number."""

    def __init__(self, workers: Workers, *, timeout_s: float, prefetch_timeout_s: float) -> None:
        """Nothing is under way.

        Args:
            workers: whom to ask.
            timeout_s: by then every worker has to say something.
            prefetch_timeout_s: what it may take longer until it answers.
        """
        self._workers = workers
        self._timeout_s = timeout_s
        self._prefetch_timeout_s = prefetch_timeout_s
        self._by_id: dict[str, PendingLookup] = {}
        self._by_seq: dict[int, PendingLookup] = {}

    def __len__(self) -> int:
        """Lookups that have no outcome yet."""
        return len(self._by_id)

    def start(self, lookup_id: str, data: bytes, scope: RequestScope, *, is_up: bool) -> None:
        """Ask every worker, or none if one of them is down: the outcome is known then."""
        self.forget(lookup_id)
        workers = self._workers
        seq = workers.next_seq()
        now = time.monotonic()
        unsent: tuple[int, ...] = ()
        if is_up:
            question = Start(seq, lookup_id, data, WireScope.of(scope))
            ranks = range(len(workers))
            unsent = tuple(rank for rank in ranks if not workers.send(rank, question))
        pending = PendingLookup(
            lookup_id=lookup_id,
            seq=seq,
            num_ranks=len(workers),
            word_deadline=now + self._timeout_s,
            deadline=now + self._timeout_s + self._prefetch_timeout_s,
            refused="" if is_up else "down",
        )
        if unsent:
            pending.refused = "full"
        self._by_id[lookup_id] = self._by_seq[seq] = pending

    def poll(self, lookup_id: str) -> tuple[PendingLookup, Outcome] | None:
        """A lookup that has an outcome now, which is told once; None: not yet, or unknown."""
        pending = self._by_id.get(lookup_id)
        if pending is None:
            return None
        while self.note(self._workers.receive(0.0)):
            pass
        outcome = pending.outcome(time.monotonic(), self._workers.is_down)
        if outcome is None:
            return None
        self.forget(lookup_id)
        for rank in outcome.silent:
            self._workers.mark_down(rank, self._timeout_s)
        if outcome.cause:
            self._workers.failures[outcome.cause] += 1
        return pending, outcome

    def is_known(self, lookup_id: str) -> bool:
        """The lookup has no outcome yet."""
        return lookup_id in self._by_id

    def note(self, arrived: Sequence[tuple[int, Reply]]) -> bool:
        """Take the answers that are for these questions; True if anything arrived at all."""
        for rank, reply in arrived:
            pending = self._by_seq.get(reply.seq)
            if pending is not None:
                pending.note(rank, reply)
        return bool(arrived)

    def wait(self, timeout_s: float) -> None:
        """Wait for any worker's word, at most ``timeout_s``; not at all if nothing is under way."""
        if self._by_id:
            self.note(self._workers.receive(max(0.0, timeout_s)))

    def forget(self, lookup_id: str) -> None:
        """Nobody wants the outcome any more."""
        pending = self._by_id.pop(lookup_id, None)
        if pending is not None:
            del self._by_seq[pending.seq]


class HitCounters:
    """Sums since they were last sent."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._asked = 0
        self._found: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def answered(self, asked: int, found: Sequence[tuple[str, int]]) -> None:
        """A lookup for ``asked`` tokens was answered: (tier, tokens) of what was found."""
        self._asked += asked
        for tier, num_tokens in found:
            self._found[tier] += num_tokens

    def failed(self, asked: int, cause: str) -> None:
        """A lookup for ``asked`` tokens was given up."""
        self._failed[cause] += asked

    def take(self, seq: int) -> Counted | None:
        """The sums as a message, after which they are zero; None if there are none."""
        if not self._asked and not self._failed:
            return None
        message = Counted(seq, self._asked, tuple(self._found.items()), tuple(self._failed.items()))
        self._asked = 0
        self._found.clear()
        self._failed.clear()
        return message


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
        self._tallies = [HitCounters() for _ in paths]  # by rank; guarded by _lock
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
