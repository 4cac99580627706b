"""SimulatedTier: a tier with a real policy and without bytes; and the replay of a trace through it.

Used by one thread. It calls the policy in the order in which LocalCPUBackend does: a lookup notes
the chain from where it ends, the chunks that were found are used, the last one first, room is made
for all missing ones at once without touching the prompt's own prefix, and they come in, the last
one first. So what is measured here is the policy that runs in production, not a model of it. (The
engine also notes the order of each prompt, for those that are stored in parts. Here they are stored
whole, and the order is right already but under FIFO, which is measured here in its pure form.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.keys import ChunkKey
from kvkeep.policy.base import CachePolicy
from kvkeep.replay.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class HitRate:
    """What was found. Only an unbroken prefix counts.

    Attributes:
        asked_tokens: tokens of all prompts.
        hit_tokens: of these, tokens that were found.
        asked_chunks: chunks of all prompts.
        hit_chunks: of these, chunks that were found.
        num_evictions: chunks that were evicted.
    """

    asked_tokens: int
    hit_tokens: int
    asked_chunks: int
    hit_chunks: int
    num_evictions: int

    @property
    def token_share(self) -> float:
        """Share of tokens that were found, 0 to 1."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0

    @property
    def chunk_share(self) -> float:
        """Share of chunks that were found, 0 to 1."""
        return self.hit_chunks / self.asked_chunks if self.asked_chunks else 0.0


class Tally:
    """Counts what each request asked for and found."""

    def __init__(self, chunk_tokens: int, num_warm_up: int) -> None:
        """Count from request number ``num_warm_up`` on, 0 being the first."""
        self._chunk_tokens = chunk_tokens
        self._left_out = num_warm_up
        self._asked_tokens = self._hit_tokens = self._asked_chunks = self._hit_chunks = 0

    def count(self, request: TraceRequest, found: int) -> None:
        """``found`` chunks at the start of the request's prompt were found."""
        if self._left_out:
            self._left_out -= 1
            return
        self._asked_tokens += request.num_tokens
        self._hit_tokens += min(found * self._chunk_tokens, request.num_tokens)
        self._asked_chunks += len(request.keys)
        self._hit_chunks += found

    def hit_rate(self, num_evictions: int) -> HitRate:
        """The sums."""
        return HitRate(
            self._asked_tokens,
            self._hit_tokens,
            self._asked_chunks,
            self._hit_chunks,
            num_evictions,
        )


class SimulatedTier:
    """The index of a pool that holds a number of chunks."""

    def __init__(self, policy: CachePolicy[bool], capacity: int) -> None:
        """Be empty.

        Args:
            policy: the order of eviction; used by this tier alone.
            capacity: chunks that fit.
        """
        self._policy = policy
        self._capacity = capacity
        # True for what may be evicted
        self._index = policy.init_mutable_mapping()
        self.num_evictions = 0

    def __len__(self) -> int:
        """Chunks in the index."""
        return len(self._index)

    def serve(self, keys: Sequence[ChunkKey]) -> int:
        """One request: look its prompt up, load what is found, store the rest.

        Returns:
            How many chunks at the start of the prompt were found.
        """
        found = self._find(keys)
        if found < len(keys):
            self._policy.note_chain(keys[max(found - 1, 0) :])
        for key in reversed(keys[:found]):
            self._policy.update_on_hit(key, self._index)
        missing = [key for key in keys[found:] if key not in self._index]
        if missing:
            self._store(keys, missing)
        return found

    def _find(self, keys: Sequence[ChunkKey]) -> int:
        for position, key in enumerate(keys):
            if key not in self._index:
                return position
        return len(keys)

    def _store(self, keys: Sequence[ChunkKey], missing: list[ChunkKey]) -> None:
        index = self._index
        own = [key for key in keys if key in index]
        room = self._make_room(len(missing), own)
        for key in reversed(missing[:room]):
            index[key] = True
            self._policy.update_on_put(key)

    def _make_room(self, wanted: int, own: Sequence[ChunkKey]) -> int:
        """Evict what is needed, but nothing of ``own``; returns how many chunks have room."""
        index = self._index
        excess = len(index) + wanted - self._capacity
        if excess > 0:
            index.update(dict.fromkeys(own, False))
            chosen = self._policy.get_evict_candidates(index, excess, bool)
            index.update(dict.fromkeys(own, True))
            for key in chosen:
                del index[key]
                self._policy.update_on_force_evict(key)
            self.num_evictions += len(chosen)
        return min(wanted, self._capacity - len(index))


def replay(
    trace: Trace, policy: CachePolicy[bool], capacity: int, *, num_warm_up: int = 0
) -> HitRate:
    """Run a workload through an empty tier.

    Args:
        trace: the workload.
        policy: a new policy.
        capacity: chunks that fit.
        num_warm_up: requests at the start that fill the tier and are not counted.
    """
    tier = SimulatedTier(policy, capacity)
    tally = Tally(trace.chunk_tokens, num_warm_up)
    for request in trace.requests:
        tally.count(request, tier.serve(request.keys))
    return tally.hit_rate(tier.num_evictions)
