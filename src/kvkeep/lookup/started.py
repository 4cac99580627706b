"""StartedLookups: lookups that nobody waits for, from the question to the last answer.

Used with the client's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvkeep.lookup.messages import Reply, Start, WireScope
from kvkeep.lookup.pending import Outcome, PendingLookup
from kvkeep.lookup.workers import Workers
from kvkeep.tokens import RequestScope


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
