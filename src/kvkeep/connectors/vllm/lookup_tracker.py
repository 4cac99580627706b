"""LookupTracker: what the workers were asked for waiting requests, and what they have found.

Scheduler process only, from the scheduler's thread. There are two forms. Without slow tiers a
question is answered within the call, and what is found is held until the end of the step. With
them a question is only started: the request waits in vLLM's queue, asked about again in every step,
while its chunks travel into memory. What was found in that way is held for as long as the request
waits, since somebody brought it for this request; everything that waiting requests hold is bounded
by ``prefetch.memory``.

vLLM does not ask about requests for which it has no seat. Of these the first few are asked about
early, so that their chunks travel while they queue, unless the engine's own prefix cache has all of
that. An answer that may be old when the request's turn comes is relied upon only if all of the
prompt was found; else the workers are asked anew, and find in memory what was brought.

Each question has an id of its own, so a lease that is still on its way is never taken for a later
one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.connectors.vllm.request import TrackedRequest
from kvkeep.engine.results import FoundTokens
from kvkeep.lookup.client import LookupClient, Outcome
from kvkeep.tokens import RequestScope

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: How long a step waits, over all its requests, for answers that come at once. A slow tier that has
#: nothing mostly says so by then, and the request need not wait for the next step.
GRACE_S = 0.003
#: The same where the engine has nothing else to do: going round takes it 2.5 ms, in which an answer
#: is not seen. A request that comes meanwhile is seen that much later.
IDLE_WAIT_S = 0.008
#: Characters of a request's id in the names of its questions; clients choose ids of any length.
_MAX_ID = 200
#: Requests without a seat that are asked about before their turn.
MAX_EARLY = 8
#: Steps in a row without any token after which an engine has nothing else to do; one more than can
#: be under way at once.
_IDLE_STEPS = 3


@dataclass(slots=True)
class _Question:
    """One question for one request.

    Attributes:
        lookup_id: names it, and the leases.
        num_asked: tokens of the request that it is about.
        scope: what the request adds to the identity.
        session_tokens: what was asked about, if it may be rewritten while the request waits.
        outcome: the answer; None: not yet.
        is_early: asked before the request's turn, and not relied upon yet.
        step: in which the request was last asked about.
        is_late: the request has been told "not yet".
        held_until: value of ``time.monotonic()`` after which the answer is not relied upon.
        asked_at: value of ``time.monotonic()``; no lease is older.
    """

    lookup_id: str
    num_asked: int
    scope: RequestScope
    session_tokens: bytes = b""
    outcome: Outcome | None = None
    is_early: bool = False
    step: int = 0
    is_late: bool = False
    held_until: float = 0.0
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def found(self) -> FoundTokens:
        """Tokens found so far."""
        return self.outcome.found if self.outcome is not None else FoundTokens()


class LookupTracker:
    """Questions and answers by request."""

    def __init__(self, client: LookupClient, *, prefetches: bool, hold_s: float) -> None:
        """Nothing was asked.

        Args:
            client: asks the workers.
            prefetches: what slow tiers have is brought into memory first.
            hold_s: how long after an answer the workers are sure to hold what they found.
        """
        #: Leading tokens of a request that the engine has in its own prefix cache.
        self.own_tokens: Callable[[Request], int] = lambda request: 0
        self._client = client
        self._prefetches = prefetches
        self._hold_s = hold_s
        self._ids = itertools.count()
        self._questions: dict[str, _Question] = {}
        self._queued: dict[str, tuple[TrackedRequest, int]] = {}  # without a question yet, in turn
        self._waited_s = 0.0  # in this step
        self._step = 0
        self._num_idle_steps = 0

    def queue(self, req_id: str, tracked: TrackedRequest, num_asked: int) -> None:
        """A request has come, and may have to wait for its turn."""
        self._queued[req_id] = (tracked, num_asked)

    def ask(
        self, req_id: str, tracked: TrackedRequest, num_asked: int, *, is_alone: bool
    ) -> FoundTokens | None:
        """Tokens of the longest prefix that can be loaded; None: not yet.

        Args:
            req_id: the waiting request, whose turn it is.
            tracked: what is known of it; has a scope.
            num_asked: leading tokens to ask about.
            is_alone: the engine has no other request, so it may wait a little for the answer.
        """
        self._queued.pop(req_id, None)
        question = self._questions.get(req_id)
        if question is not None and not self._is_valid(question, tracked, num_asked):
            self.drop(req_id)
            question = None
        if question is None:
            question = self._ask(req_id, tracked, num_asked, is_alone)
        elif question.outcome is None:
            question.outcome = self._await(question, IDLE_WAIT_S if is_alone else 0.0)
            if question.outcome is not None and self._is_old(question):
                question = self._rely_on(req_id, question, tracked, is_alone)
        question.step = self._step
        if question.outcome is None:
            question.is_late = True
            return None
        if not question.held_until:
            question.held_until = time.monotonic() + self._hold_s
            self._count(question, tracked)
        if not question.found:
            del self._questions[req_id]
        return question.found

    def take(self, req_id: str) -> str | None:
        """The id of an answered question, whose lease is the caller's from now on."""
        question = self._questions.get(req_id)
        if question is None or not question.found:
            return None
        del self._questions[req_id]
        return question.lookup_id

    def drop(self, req_id: str) -> None:
        """The request needs no answer (any more), nor what was found for it."""
        self._queued.pop(req_id, None)
        question = self._questions.pop(req_id, None)
        if question is not None:
            self._client.unpin([question.lookup_id])

    def drop_all(self) -> None:
        """Nobody needs any answer any more."""
        self._queued.clear()
        self._unpin(list(self._questions))

    def end_step(self, *, is_idle: bool) -> None:
        """A step was scheduled: what was found at once for requests that are not in it is let go.

        Where no step computes anything, and none has waited for an answer, this waits a little.

        Args:
            is_idle: the step computes no token.
        """
        self._unpin(
            [
                req_id
                for req_id, question in self._questions.items()
                if question.outcome is not None and not question.is_late
            ]
        )
        self._ask_early()
        self._step += 1
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle else 0
        if self._num_idle_steps >= _IDLE_STEPS and not self._waited_s:
            self._client.wait(IDLE_WAIT_S)
        self._waited_s = 0.0

    def __len__(self) -> int:
        """Requests with a question under way, or an answer that is held."""
        return len(self._questions)

    def _is_valid(self, question: _Question, tracked: TrackedRequest, num_asked: int) -> bool:
        """What was asked is what would be asked now, and the answer can be relied upon."""
        if (question.num_asked, question.scope) != (num_asked, tracked.scope):
            return False
        if tracked.request.resumable and question.session_tokens != tracked.token_bytes(num_asked):
            return False
        if question.outcome is None:
            return True
        return question.is_late and time.monotonic() < question.held_until

    def _ask(
        self, req_id: str, tracked: TrackedRequest, num_asked: int, is_alone: bool
    ) -> _Question:
        """Ask anew; the question is answered already if the answer comes at once."""
        lookup_id = self._new_id(req_id)
        tokens = tracked.token_bytes(num_asked)
        scope = tracked.scope
        if scope is None:
            raise ValueError(f"{req_id} has no name for its KV")
        session_tokens = tokens if tracked.request.resumable else b""
        question = self._questions[req_id] = _Question(lookup_id, num_asked, scope, session_tokens)
        if not self._prefetches:
            counted, tracked.was_asked = not tracked.was_asked, True
            found = self._client.lookup(lookup_id, tokens, scope=scope, counted=counted)
            question.outcome = Outcome(found)
            return question
        self._client.start(lookup_id, tokens, scope=scope)
        question.outcome = self._await(question, IDLE_WAIT_S if is_alone else GRACE_S)
        return question

    def _await(self, question: _Question, limit_s: float) -> Outcome | None:
        """The answer; None: not yet, and this step has waited for ``limit_s`` in all."""
        outcome = self._client.poll(question.lookup_id)
        while outcome is None and self._waited_s < limit_s:
            started = time.monotonic()
            self._client.wait(limit_s - self._waited_s)
            self._waited_s += time.monotonic() - started
            outcome = self._client.poll(question.lookup_id)
        return outcome

    def _new_id(self, req_id: str) -> str:
        """A name that no other question has; of a long request id, its start."""
        start = req_id[:_MAX_ID].encode("ascii", "replace").decode()
        return f"{start}#{next(self._ids)}"

    def _count(self, question: _Question, tracked: TrackedRequest) -> None:
        """An answer that is relied upon is part of the hit rate, once per request."""
        if not tracked.was_asked and question.outcome is not None:
            tracked.was_asked = True
            self._client.count(question.num_asked, question.outcome)

    def _ask_early(self) -> None:
        """Ask about the first requests in the queue whose turn has not come."""
        num_early = sum(question.is_early for question in self._questions.values())
        while self._queued and num_early < MAX_EARLY:
            req_id = next(iter(self._queued))
            tracked, num_asked = self._queued.pop(req_id)
            limit = min(num_asked, tracked.request.num_tokens - 1)
            if tracked.scope is None or self.own_tokens(tracked.request) >= limit:
                continue
            lookup_id = self._new_id(req_id)
            tokens = tracked.token_bytes(num_asked)
            session_tokens = tokens if tracked.request.resumable else b""
            self._questions[req_id] = _Question(
                lookup_id, num_asked, tracked.scope, session_tokens, is_early=True
            )
            self._client.start(lookup_id, tokens, scope=tracked.scope)
            num_early += 1

    def _is_old(self, question: _Question) -> bool:
        """The answer may have come long before it was looked at."""
        return question.is_early or self._step > question.step + 1

    def _rely_on(
        self, req_id: str, question: _Question, tracked: TrackedRequest, is_alone: bool
    ) -> _Question:
        """An old answer, if it is the best there can be; else ask anew."""
        question.is_early = False
        is_held = time.monotonic() < question.asked_at + self._hold_s
        if question.found == question.num_asked and is_held:
            question.is_late = True  # somebody brought it: held as long as the request waits
            return question
        was_late = question.is_late
        self.drop(req_id)
        question = self._ask(req_id, tracked, question.num_asked, is_alone)
        question.is_late = was_late
        return question

    def _unpin(self, req_ids: list[str]) -> None:
        lookup_ids = [self._questions.pop(req_id).lookup_id for req_id in req_ids]
        if lookup_ids:
            self._client.unpin(lookup_ids)
