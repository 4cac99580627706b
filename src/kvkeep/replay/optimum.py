"""The clairvoyant bound: what the best of all policies could find that knows the future.

Pure. Evicting the chunk whose next use lies furthest ahead, also the one that has just come
(Belady's MIN with bypass), gives the most hits for entries of one size. Here hits count only in an
unbroken prefix, and still it is the optimum: a chunk's next use is never before its predecessor's,
since whoever asks for it asks for the predecessor first. So if ties go to the predecessor, the
chunks that are kept always form whole prefixes, and every hit of MIN is one in an unbroken prefix.
(L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.)
"""

from __future__ import annotations

import heapq

from kvkeep.keys import ChunkKey
from kvkeep.replay.simulator import HitRate, Tally
from kvkeep.replay.trace import Trace

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
