"""SimulatedTier: a tier with a real policy and without bytes; and the replay of a trace through it.

Used by one thread. It calls the policy in the order in which LocalCPUBackend does: a lookup notes
the chain from where it ends, the chunks that were found are used, the last one first, room is made
for all missing ones at once without touching the prompt's own prefix, and they come in, the last
one first. So what is measured here is the policy that runs in production, not a model of it. (The
engine also notes the order of each prompt, for those that are stored in parts. Here they are stored
whole, and the order is right already but under FIFO, which is measured here in its pure form.)

The clairvoyant bound: what the best of all policies could find that knows the future.

Pure. Evicting the chunk whose next use lies furthest ahead, also the one that has just come
(Belady's MIN with bypass), gives the most hits for entries of one size. Here hits count only in an
unbroken prefix, and still it is the optimum: a chunk's next use is never before its predecessor's,
since whoever asks for it asks for the predecessor first. So if ties go to the predecessor, the
chunks that are kept always form whole prefixes, and every hit of MIN is one in an unbroken prefix.
(L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.)

Sweep: one workload through several sizes and policies, beside the clairvoyant optimum.

For ``kvkeep replay``: from bytes to chunks, the runs, and the sentence that an operator wants. One
thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import cast

from kvkeep.errors import ConfigError
from kvkeep.hashing import ChunkKey
from kvkeep.policy.base import CachePolicy
from kvkeep.policy.names import POLICIES
from kvkeep.policy.probation import ProbationPolicy
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


#: The next use of a chunk that is never used again.
_NEVER = 1 << 62


def optimum(trace: Trace, capacity: int, *, num_warm_up: int = 0) -> HitRate:
    """The most that any policy can find.

    Args:
        trace: the workload.
        capacity: chunks that fit.
        num_warm_up: requests at the start that are not counted. What is found after them is then
            what the policy finds that is best over all, which may not be the most.
    """
    kept: dict[
        ChunkKey, tuple[int, int]
    ] = {}  # (minus next use, minus position): first to go first
    order: list[tuple[int, int, ChunkKey]] = []  # a heap of the same, with outdated entries
    tally, num_evictions = Tally(trace.chunk_tokens, num_warm_up), 0
    for request, next_uses in zip(trace.requests, _next_uses(trace), strict=True):
        found = 0
        for key in request.keys:
            if key not in kept:
                break
            found += 1
        tally.count(request, found)
        for position, (key, next_use) in enumerate(zip(request.keys, next_uses, strict=True)):
            if next_use == _NEVER:
                kept.pop(key, None)
                continue
            kept[key] = rank = (-next_use, -position)
            heapq.heappush(order, (*rank, key))
            while len(kept) > capacity:
                *last, victim = heapq.heappop(order)
                if kept.get(victim) == tuple(last):
                    del kept[victim]
                    num_evictions += 1
    return tally.hit_rate(num_evictions)


def _next_uses(trace: Trace) -> list[list[int]]:
    """By request and chunk: the number of the next request that uses the chunk."""
    next_use: dict[ChunkKey, int] = {}
    result: list[list[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        keys = trace.requests[number].keys
        result.append([next_use.get(key, _NEVER) for key in keys])
        next_use.update(dict.fromkeys(keys, number))
    result.reverse()
    return result


#: (runs that are done, runs in all, what is running).
Report = Callable[[int, int, str], None]

#: Every policy that can be replayed by its name.
POLICY_NAMES = (*POLICIES, ProbationPolicy.name)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """What a pool of one size would have found.

    Attributes:
        chunks: that fit.
        by_policy: what each policy found, in the order asked for.
        best: what the clairvoyant optimum found.
    """

    chunks: int
    by_policy: dict[str, HitRate]
    best: HitRate


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results for one workload.

    Attributes:
        num_requests: of the workload.
        asked_tokens: tokens of all prompts.
        footprint: number of different chunks: a pool of this size holds everything.
        limit: what a pool of that size finds; no more can be found.
        sizes: the smallest first.
    """

    num_requests: int
    asked_tokens: int
    footprint: int
    limit: HitRate
    sizes: tuple[SizeResult, ...]


def check_policies(names: Sequence[str]) -> None:
    """Refuse a policy that there is not.

    Raises:
        ConfigError: it names those there are.
    """
    for name in names:
        if name not in POLICY_NAMES:
            known = ", ".join(sorted(POLICY_NAMES))
            raise ConfigError(f"unknown cache policy {name!r}; known: {known}")


def chunks_of_size(size_bytes: int, block_bytes: int) -> int:
    """How many chunks fit into a pool.

    Args:
        size_bytes: of the pool.
        block_bytes: KV bytes of one full block of the trace.

    Raises:
        ConfigError: none does.
    """
    if size_bytes < block_bytes:
        raise ConfigError(f"a pool of {size_bytes:,} bytes holds no block of {block_bytes:,} bytes")
    return size_bytes // block_bytes


def chunks_of_share(share: Fraction, footprint: int) -> int:
    """How many chunks a share of everything is, at least one."""
    return max(1, int(share * footprint))


def sweep(
    trace: Trace,
    capacities: Sequence[int],
    policies: Sequence[str],
    report: Report,
    *,
    num_warm_up: int = 0,
) -> Sweep:
    """Replay a workload, each time from an empty pool.

    Args:
        trace: the workload.
        capacities: sizes of the pool, in chunks; equal ones are run once.
        policies: names out of :data:`POLICY_NAMES`.
        report: told before each run.
        num_warm_up: requests at the start that fill the pool and are not counted.
    """
    check_policies(policies)
    footprint = trace.footprint()
    wanted = sorted(set(capacities))
    done, total = 0, len(wanted) * (len(policies) + 1) + 1
    results = []
    for chunks in wanted:
        rates: dict[str, HitRate] = {}
        for name in policies:
            report(done, total, f"{name}, {chunks:,} chunks")
            rates[name] = replay(trace, new_policy(name), chunks, num_warm_up=num_warm_up)
            done += 1
        report(done, total, f"optimum, {chunks:,} chunks")
        results.append(SizeResult(chunks, rates, optimum(trace, chunks, num_warm_up=num_warm_up)))
        done += 1
    report(done, total, "everything kept")
    limit = optimum(trace, max(1, footprint), num_warm_up=num_warm_up)
    return Sweep(len(trace.requests), limit.asked_tokens, footprint, limit, tuple(results))


def what_memory_buys(results: Sweep, policy: str, label: Callable[[int], str]) -> str:
    """How much memory finds how much, in sentences.

    Args:
        results: of a workload.
        policy: the one to speak of.
        label: name of a size in chunks.
    """
    shares = [(size.chunks, 100 * size.by_policy[policy].token_share) for size in results.sizes]
    first_chunks, first = shares[0]
    parts = [f"With {policy}, {label(first_chunks)} finds {first:.1f}% of all prompt tokens"]
    for (before_chunks, before), (chunks, share) in pairwise(shares):
        more = label(chunks - before_chunks)
        parts.append(f"{more} more finds {share - before:+.1f} points ({share:.1f}%)")
    limit = 100 * results.limit.token_share
    return (
        "; ".join(parts)
        + f". Nothing finds more than {limit:.1f}%, which takes at most "
        + f"{label(results.footprint)}."
    )


def new_policy(name: str) -> CachePolicy[bool]:
    """A new policy out of :data:`POLICY_NAMES`, for a simulated tier."""
    if name == ProbationPolicy.name:
        return ProbationPolicy[bool]()
    # A policy never looks at the values that it orders.
    return cast("CachePolicy[bool]", POLICIES[name]())
