"""Metrics: what kvkeep counts, under documented names, in Prometheus form.

Every :class:`Metrics` has a registry of its own unless one is given; nothing is global. Methods are
named for what happened. Callable from any thread; a call costs a few microseconds, so hot paths
call once per batch. Gauges are read from their owners when somebody looks, so nothing moves while
nothing happens.

The hit rate is defined at the lookup: tokens found divided by tokens asked for, misses included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

#: Tier of a copy between the engine's memory and the pool, unless the caller names another.
POOL_TIER = "LocalCPUBackend"
#: Values of the label ``direction``.
STORE, LOAD = "store", "load"

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kvkeep_lookup_tokens": ("Tokens that lookups asked for.", ()),
    "kvkeep_lookup_hit_tokens": ("Tokens that lookups found.", ("tier",)),
    "kvkeep_loaded_tokens": ("Tokens whose KV was written into engine memory.", ("tier",)),
    "kvkeep_stored_tokens": ("Tokens whose KV was copied out of engine memory.", ()),
    "kvkeep_store_skipped_tokens": ("Tokens that a store left out.", ("cause",)),
    "kvkeep_dropped_chunks": ("Chunks shed by a tier on their way in.", ("tier", "cause")),
    "kvkeep_evictions": ("Chunks evicted by policy.", ("tier",)),
    "kvkeep_failures": ("Failed calls of a backend.", ("tier", "operation", "cause")),
    "kvkeep_load_failed_tokens": ("Tokens found and then not loaded.", ("cause",)),
    "kvkeep_leases_expired": ("Leases taken back after their deadline.", ()),
    "kvkeep_bytes": ("Bytes of KV moved.", ("tier", "direction")),
    "kvkeep_seconds": ("Seconds spent moving KV.", ("tier", "direction")),
}
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "kvkeep_pool_bytes": ("Bytes of the memory pool.", ("state",)),
    "kvkeep_leases_open": ("Leases that wait for their load.", ()),
    "kvkeep_chunks": ("Chunks that can be read.", ("tier",)),
    "kvkeep_backend_bypassed": ("1 while a tier is left out, else 0.", ("tier",)),
}


class Metrics:
    """All counters and gauges of one engine."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Register everything.

        Args:
            registry: where to; a new one if None.
        """
        self.registry = registry if registry is not None else CollectorRegistry()
        self._counters = {
            name: Counter(name, text, labels, registry=self.registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        # Counters with their labels, so that counting takes no lock of the registry's: it also
        # happens in finalizers, in the middle of anything.
        self._series: dict[tuple[str, tuple[str, ...]], Counter] = {}
        self._gauges = {
            name: Gauge(name, text, labels, registry=self.registry)
            for name, (text, labels) in _GAUGES.items()
        }

    def _add(self, name: str, amount: float, *labels: str) -> None:
        series = self._series.get((name, labels))
        if series is None:
            counter = self._counters[name]
            series = counter.labels(*labels) if labels else counter
            self._series[name, labels] = series
        series.inc(amount)

    def lookup(self, *, asked: int, found: Mapping[str, int]) -> None:
        """A lookup was answered.

        Args:
            asked: tokens of the prompt.
            found: tokens found, by tier.
        """
        self._add("kvkeep_lookup_tokens", asked)
        for tier, tokens in found.items():
            self._add("kvkeep_lookup_hit_tokens", tokens, tier)

    def stored(self, tokens: int, num_bytes: int, seconds: float, *, tier: str = POOL_TIER) -> None:
        """The KV of ``tokens`` tokens was copied out of the engine's memory."""
        self._add("kvkeep_stored_tokens", tokens)
        self.moved(tier, STORE, num_bytes, seconds)

    def store_skipped(self, tokens: int, cause: str) -> None:
        """A store left ``tokens`` tokens out."""
        self._add("kvkeep_store_skipped_tokens", tokens, cause)

    def loaded(
        self,
        tokens: Mapping[str, int],
        num_bytes: int,
        seconds: float,
        *,
        tier: str = POOL_TIER,
    ) -> None:
        """KV was written into the engine's memory.

        Args:
            tokens: how many, by the tier that they were found in.
            num_bytes: bytes copied out of the pool.
            seconds: for that copy.
            tier: whose memory the pool is. What a lower tier read into it is that tier's to count.
        """
        for source, count in tokens.items():
            self._add("kvkeep_loaded_tokens", count, source)
        self.moved(tier, LOAD, num_bytes, seconds)

    def load_failed(self, tokens: int, cause: str) -> None:
        """``tokens`` tokens were found and then could not be loaded."""
        self._add("kvkeep_load_failed_tokens", tokens, cause)

    def moved(self, tier: str, direction: str, num_bytes: int, seconds: float) -> None:
        """Bytes moved into (``"store"``) or out of (``"load"``) a tier."""
        self._add("kvkeep_bytes", num_bytes, tier, direction)
        self._add("kvkeep_seconds", seconds, tier, direction)

    def evicted(self, tier: str, chunks: int) -> None:
        """The policy of ``tier`` gave up ``chunks`` chunks."""
        self._add("kvkeep_evictions", chunks, tier)

    def dropped(self, tier: str, cause: str, chunks: int) -> None:
        """``tier`` did not take ``chunks`` chunks in."""
        self._add("kvkeep_dropped_chunks", chunks, tier, cause)

    def failure(self, tier: str, operation: str, cause: str) -> None:
        """One call of a backend failed."""
        self._add("kvkeep_failures", 1, tier, operation, cause)

    def lease_expired(self) -> None:
        """A lease was taken back after its deadline."""
        self._add("kvkeep_leases_expired", 1)

    def watch_pool(self, used: Callable[[], float], free: Callable[[], float]) -> None:
        """Read the gauges ``kvkeep_pool_bytes`` from these two."""
        self._gauges["kvkeep_pool_bytes"].labels("used").set_function(used)
        self._gauges["kvkeep_pool_bytes"].labels("free").set_function(free)

    def watch_leases(self, count: Callable[[], float]) -> None:
        """Read the gauge ``kvkeep_leases_open`` from ``count``."""
        self._gauges["kvkeep_leases_open"].set_function(count)

    def watch_chunks(self, tier: str, count: Callable[[], float]) -> None:
        """Read the gauge ``kvkeep_chunks`` of ``tier`` from ``count``."""
        self._gauges["kvkeep_chunks"].labels(tier).set_function(count)

    def watch_bypass(self, tier: str, is_bypassed: Callable[[], float]) -> None:
        """Read the gauge ``kvkeep_backend_bypassed`` of ``tier`` from ``is_bypassed``."""
        self._gauges["kvkeep_backend_bypassed"].labels(tier).set_function(is_bypassed)

    def snapshot(self) -> dict[str, float]:
        """Every value now, by name and labels: ``'kvkeep_evictions_total{tier="x"}'``."""
        values: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                values[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return values

    def hit_rate(self) -> float:
        """Tokens found divided by tokens asked for in all lookups; 0.0 before the first."""
        asked = found = 0.0
        for name, value in self.snapshot().items():
            if name == "kvkeep_lookup_tokens_total":
                asked = value
            elif name.startswith("kvkeep_lookup_hit_tokens_total"):
                found += value
        return found / asked if asked else 0.0

    def exposition(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self.registry)
