"""look_up_later: the longest stored prefix, answered once it is in memory and held.

Callable from any thread; nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future

from kvkeep.request import EngineParts
from kvkeep.results import FoundTokens
from kvkeep.storage.prefetch import Prefetched
from kvkeep.tokens import TokenChunks


def look_up_later(
    parts: EngineParts,
    chunks: TokenChunks,
    lookup_id: str,
    *,
    search_range: Collection[str] | None,
    counted: bool,
) -> Future[FoundTokens]:
    """Number of tokens found and in which tiers they were, as a future that cannot be cancelled.

    It is done already where everything is in memory.

    Args:
        parts: of the engine.
        chunks: the prompt.
        lookup_id: names the lookup and its lease.
        search_range: names of the tiers to ask; all if None.
        counted: the lookup is part of the hit rate.

    Raises:
        ValueError: no tier is called so.
    """
    started = time.perf_counter()
    span = parts.metrics.spans.start("lookup", lookup_id)
    try:
        prefetching = parts.storage_manager.async_lookup_and_prefetch(
            lookup_id, chunks.keys, (0, *chunks.ends), search_range
        )
    except ValueError as error:
        span.end(error)
        raise
    answer: Future[FoundTokens] = Future()
    answer.set_running_or_notify_cancel()

    def arrived(future: Future[Prefetched]) -> None:
        runs = future.result().runs
        found = FoundTokens(
            [(run.location, chunks.end_of(run.end) - chunks.end_of(run.start)) for run in runs]
        )
        span.note({"tokens": chunks.num_tokens, "tokens_found": found, "tiers": list(found.sums())})
        span.end()
        parts.metrics.lookup_took(time.perf_counter() - started)
        if counted:
            parts.metrics.lookup(asked=chunks.num_tokens, found=found.sums())
        answer.set_result(found)

    prefetching.add_done_callback(arrived)
    return answer
