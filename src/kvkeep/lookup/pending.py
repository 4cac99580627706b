"""PendingLookup: a lookup whose answers are on their way, and what they come to.

Pure bookkeeping: who has answered what by when; nothing is sent here. Used with the client's lock
held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvkeep.lookup.messages import ErrorReply, LookupReply, Reply, Started
from kvkeep.results import FoundTokens


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
