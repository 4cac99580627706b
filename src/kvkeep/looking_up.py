"""look_up: the longest stored prefix of a prompt, and the lease on it. Callable from any thread."""

from __future__ import annotations

import time
from collections.abc import Collection

from kvkeep.prefix import LocatedRun
from kvkeep.request import ENGINE_MEMORY, EngineParts
from kvkeep.results import FoundTokens
from kvkeep.tokens import TokenChunks


def look_up(
    parts: EngineParts,
    chunks: TokenChunks,
    *,
    lease_id: str | None,
    search_range: Collection[str] | None,
    counted: bool = True,
) -> FoundTokens:
    """Number of tokens found, and in which tiers.

    Args:
        parts: of the engine.
        chunks: the prompt.
        lease_id: pin what is found and register the lease under this id, in place of the one that
            it had; None pins nothing.
        search_range: names of the tiers to ask; all if None.
        counted: the lookup is part of the hit rate.

    Raises:
        ValueError: no tier is called so.
    """
    started = time.perf_counter()
    with parts.metrics.spans.start("lookup", lease_id) as span:
        runs = _locate(parts, chunks, lease_id, search_range)
        found = FoundTokens(
            [(run.location, chunks.end_of(run.end) - chunks.end_of(run.start)) for run in runs]
        )
        by_tier = found.sums()
        span.note({"tokens": chunks.num_tokens, "tokens_found": found, "tiers": list(by_tier)})
    parts.metrics.lookup_took(time.perf_counter() - started)
    if counted:
        parts.metrics.lookup(asked=chunks.num_tokens, found=by_tier)
    return found


def _locate(
    parts: EngineParts,
    chunks: TokenChunks,
    lease_id: str | None,
    search_range: Collection[str] | None,
) -> list[LocatedRun]:
    """Where the chunks are; the lease, if there is to be one, is registered."""
    storage = parts.storage_manager
    lease = storage.leases.open(lease_id) if lease_id is not None else None
    try:
        runs = storage.get_block_mapping(chunks.keys, search_range, pin=lease)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    if lease is not None and lease_id is not None:
        if runs:
            storage.leases.keep(lease_id, lease)
        else:
            lease.release()  # a tier may have pinned something and failed then
            storage.leases.release(lease_id)
    return runs


def refuse_lookup(
    parts: EngineParts, chunks: TokenChunks, cause: str, *, counted: bool
) -> FoundTokens:
    """The answer of an engine that cannot load: nothing is found, a miss in the hit rate too."""
    parts.metrics.failure(ENGINE_MEMORY, "lookup", cause)
    if counted:
        parts.metrics.lookup(asked=chunks.num_tokens, found={})
    return FoundTokens()
