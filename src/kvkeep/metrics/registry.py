"""Metrics: counts under the names of the catalogue.

Every :class:`Metrics` has a registry of its own unless one is given; nothing is global. Methods are
named for what happened. Callable from any thread; a call costs a few microseconds, so hot paths
call once per batch. Gauges are read from their owners when somebody looks, so nothing moves while
nothing happens.

The hit rate is defined at the lookup: tokens found divided by tokens asked for, misses included.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from kvkeep.metrics.catalogue import CATALOGUE, INTEGRITY_CAUSES, Kind, MetricSpec
from kvkeep.metrics.spans import NO_SPANS, Spans

#: Tier of a copy between the engine's memory and the pool, unless the caller names another.
POOL_TIER = "LocalCPUBackend"
#: Values of the label ``direction``.
STORE, LOAD = "store", "load"

#: Metrics of which each tier has one series from the start.
_OF_TIERS = ("kvkeep_lookup_hit_tokens", "kvkeep_loaded_tokens", "kvkeep_evictions")

#: Most series of one metric. What comes after them (causes that a plugin makes up) is OTHER.
MAX_SERIES = 200
OTHER = "other"

#: Moves that are kept for who follows them and has not taken them; older ones are forgotten.
MAX_MOVES = 1 << 16
#: Name of a metric, values of its labels, and by how much it moved or what was observed.
Move = tuple[str, tuple[str, ...], float]

_Series = Counter | Gauge | Histogram


def _make(spec: MetricSpec, registry: CollectorRegistry) -> _Series:
    if spec.kind is Kind.COUNTER:
        return Counter(spec.name, spec.text, spec.labels, registry=registry)
    if spec.kind is Kind.GAUGE:
        return Gauge(spec.name, spec.text, spec.labels, registry=registry)
    return Histogram(spec.name, spec.text, spec.labels, registry=registry, buckets=spec.bounds)


class _WithoutCreated:
    """A registry without the times at which series were made, which double what is sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class Metrics:
    """All metrics of one engine."""

    def __init__(
        self, registry: CollectorRegistry | None = None, *, spans: Spans = NO_SPANS
    ) -> None:
        """Register everything.

        Args:
            registry: where to; a new one if None.
            spans: starts the spans of lookups, loads and stores.
        """
        self.spans = spans
        self.registry = registry if registry is not None else CollectorRegistry()
        self._families = {name: _make(spec, self.registry) for name, spec in CATALOGUE.items()}
        # Series with their labels, so that counting takes no lock of the registry's: it also
        # happens in finalizers, in the middle of anything.
        self._series: dict[tuple[str, tuple[str, ...]], _Series] = {}
        self._num_series: Tally[str] = Tally()
        self._moves: deque[Move] | None = None  # appended to by any thread, without a lock

    def _of(self, name: str, labels: tuple[str, ...]) -> tuple[_Series, tuple[str, ...]]:
        """A series, and the labels that it has: with too many of them those of OTHER."""
        series = self._series.get((name, labels))
        if series is None:
            family = self._families[name]
            if self._num_series[name] >= MAX_SERIES:
                labels = (OTHER,) * len(labels)
                return family.labels(*labels), labels
            series = family.labels(*labels) if labels else family
            self._series[name, labels] = series
            self._num_series[name] += 1
        return series, labels

    def _add(self, name: str, amount: float, *labels: str) -> None:
        series, labels = self._of(name, labels)
        assert isinstance(series, Counter)
        series.inc(amount)
        if self._moves is not None:
            self._moves.append((name, labels, amount))

    def _observe(self, name: str, value: float, *labels: str) -> None:
        series, labels = self._of(name, labels)
        assert isinstance(series, Histogram)
        series.observe(value)
        if self._moves is not None:
            self._moves.append((name, labels, value))

    def _watch(self, name: str, read: Callable[[], float], *labels: str) -> None:
        series, _ = self._of(name, labels)
        assert isinstance(series, Gauge)
        series.set_function(read)

    def lookup(self, *, asked: int, found: Mapping[str, int]) -> None:
        """A lookup was answered.

        Args:
            asked: tokens of the prompt.
            found: tokens found, by tier.
        """
        self._add("kvkeep_lookup_tokens", asked)
        for tier, tokens in found.items():
            self._add("kvkeep_lookup_hit_tokens", tokens, tier)

    def lookup_failed(self, asked: int, cause: str) -> None:
        """A lookup for ``asked`` tokens was given up, which is a miss of all of them."""
        self._add("kvkeep_lookup_tokens", asked)
        self._add("kvkeep_lookup_failed_tokens", asked, cause)

    def lookup_took(self, seconds: float) -> None:
        """One lookup was worked on for ``seconds``."""
        self._observe("kvkeep_lookup_seconds", seconds)

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
        """One operation moved bytes into (``"store"``) or out of (``"load"``) a tier."""
        self._observe("kvkeep_transfer_bytes", num_bytes, tier, direction)
        self._observe("kvkeep_transfer_seconds", seconds, tier, direction)

    def tier_skipped(self, tier: str, cause: str, tokens: int) -> None:
        """``tier`` was not asked for ``tokens`` tokens."""
        self._add("kvkeep_tier_skipped_tokens", tokens, tier, cause)

    def evicted(self, tier: str, chunks: int) -> None:
        """The policy of ``tier`` gave up ``chunks`` chunks."""
        self._add("kvkeep_evictions", chunks, tier)

    def dropped(self, tier: str, cause: str, chunks: int) -> None:
        """``tier`` did not take ``chunks`` chunks in."""
        self._add("kvkeep_dropped_chunks", chunks, tier, cause)

    def failure(self, tier: str, operation: str, cause: str) -> None:
        """One call failed, or one chunk did not verify (a cause in ``INTEGRITY_CAUSES``)."""
        self._add("kvkeep_failures", 1, tier, operation, cause)
        if cause in INTEGRITY_CAUSES:
            self._add("kvkeep_integrity_failures", 1, tier, cause)

    def prefetched(self, outcome: str) -> None:
        """An asynchronous lookup that had to wait for a slow tier has ended."""
        self._add("kvkeep_prefetches", 1, outcome)

    def lease_expired(self) -> None:
        """A lease was taken back after its deadline."""
        self._add("kvkeep_leases_expired", 1)

    def watch_pool(self, used: Callable[[], float], free: Callable[[], float]) -> None:
        """Read the gauges ``kvkeep_pool_bytes`` from these two."""
        self._watch("kvkeep_pool_bytes", used, "used")
        self._watch("kvkeep_pool_bytes", free, "free")

    def watch_leases(self, count: Callable[[], float]) -> None:
        """Read the gauge ``kvkeep_leases_open`` from ``count``."""
        self._watch("kvkeep_leases_open", count)

    def watch_prefetches(self, count: Callable[[], float]) -> None:
        """Read the gauge ``kvkeep_prefetches_running`` from ``count``."""
        self._watch("kvkeep_prefetches_running", count)

    def watch_chunks(self, tier: str, count: Callable[[], float]) -> None:
        """Read the gauge ``kvkeep_chunks`` of ``tier`` from ``count``."""
        self._watch("kvkeep_chunks", count, tier)

    def watch_bypass(self, tier: str, is_bypassed: Callable[[], float]) -> None:
        """Read the gauge ``kvkeep_backend_bypassed`` of ``tier`` from ``is_bypassed``.

        The tier's usual series start at zero with it, or their first move would look like none.
        """
        self._watch("kvkeep_backend_bypassed", is_bypassed, tier)
        for name in _OF_TIERS:
            self._of(name, (tier,))
        for name in ("kvkeep_transfer_bytes", "kvkeep_transfer_seconds"):
            for direction in (LOAD, STORE):
                self._of(name, (tier, direction))

    def watch_prefill(self, rate: Callable[[], float]) -> None:
        """Read the gauge ``kvkeep_prefill_tokens_per_second`` from ``rate``."""
        self._watch("kvkeep_prefill_tokens_per_second", rate)

    def watch_load(
        self, tier: str, *, rate: Callable[[], float], start_s: Callable[[], float]
    ) -> None:
        """Read the gauges of what is expected of ``tier`` from these two."""
        self._watch("kvkeep_expected_load_bytes_per_second", rate, tier)
        self._watch("kvkeep_expected_load_start_seconds", start_s, tier)

    def watch_breaker(self, tier: str, direction: str, is_open: Callable[[], float]) -> None:
        """Read the gauge ``kvkeep_breaker_open`` of ``tier`` from ``is_open``."""
        self._watch("kvkeep_breaker_open", is_open, tier, direction)

    def watch_queue(
        self,
        tier: str,
        *,
        loads: Callable[[], float],
        stores: Callable[[], float],
        num_bytes: Callable[[], float],
    ) -> None:
        """Read the gauges of a tier's queues.

        Args:
            tier: whose.
            loads: loads that wait for a thread.
            stores: stores that wait for a thread.
            num_bytes: memory that these stores hold.
        """
        self._watch("kvkeep_queued_operations", loads, tier, LOAD)
        self._watch("kvkeep_queued_operations", stores, tier, STORE)
        self._watch("kvkeep_queued_bytes", num_bytes, tier)

    def follow(self) -> None:
        """Keep what moves from now on for :meth:`take_moves`."""
        self._moves = deque(maxlen=MAX_MOVES)

    def take_moves(self) -> list[Move]:
        """What has moved since the last call, for one caller that follows."""
        moves: list[Move] = []
        while self._moves:
            moves.append(self._moves.popleft())
        return moves

    def gauges(self) -> list[Move]:
        """The values of all gauges now."""
        return [
            (name, tuple(sample.labels.values()), sample.value)
            for name, family in self._families.items()
            if isinstance(family, Gauge)
            for metric in family.collect()
            for sample in metric.samples
        ]

    def snapshot(self) -> dict[str, float]:
        """Every value now, by name and labels: ``'kvkeep_evictions_total{tier="x"}'``.

        Of a histogram it has sum and count, not the buckets.
        """
        values: dict[str, float] = {}
        for family in _WithoutCreated(self.registry).collect():
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
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
        return generate_latest(_WithoutCreated(self.registry))
