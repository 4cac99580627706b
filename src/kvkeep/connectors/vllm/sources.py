"""hit_sources: where found tokens were, in the words of vLLM's metrics. A pure function."""

from __future__ import annotations

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvkeep.results import FoundTokens

_SOURCES = {"LocalCPUBackend": CacheHitSource.HOST, "LocalDiskBackend": CacheHitSource.DISK}


def hit_sources(found: FoundTokens, start: int, num_tokens: int) -> dict[CacheHitSource, int]:
    """Tokens [start, start + num_tokens) of what a lookup found, by vLLM's sources.

    A tier that vLLM has no word for (a remote store, a plugin) is EXTERNAL_UNSPECIFIED, and so is
    what was not found at all.
    """
    sources: dict[CacheHitSource, int] = {}
    left = num_tokens
    for sign, tiers in ((1, found.first(start + num_tokens).tiers), (-1, found.first(start).tiers)):
        for tier, count in tiers:
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + sign * count
            left -= sign * count
    if left > 0:
        unknown = CacheHitSource.EXTERNAL_UNSPECIFIED
        sources[unknown] = sources.get(unknown, 0) + left
    return {source: count for source, count in sources.items() if count}
