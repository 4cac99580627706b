"""What an engine did between two samples of its workers. Pure.

Sample: all numbers of one worker at one moment. Immutable values and pure functions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from prometheus_client.parser import text_string_to_metric_families

_SERIES = re.compile(r"([a-z_0-9]+)(?:\{(.*)\})?", re.DOTALL)
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Series:
    """One number.

    Attributes:
        name: of the metric, with its ending (``kvkeep_evictions_total``).
        labels: name -> value.
        value: the number.
    """

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers of one worker.

    Attributes:
        worker: names the worker, the same in each of its samples.
        engine: names the engine that it belongs to.
        rank: its place in the engine.
        time_s: when it was taken, on a clock that never goes back.
        series: every number.
    """

    worker: str
    engine: str
    rank: int
    time_s: float
    series: tuple[Series, ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum of every series of ``name`` that has these labels; 0.0 if there is none."""
        return sum(one.value for one in self._having(name, labels))

    def largest(self, name: str, **labels: str) -> float:
        """The largest of them; 0.0 if there is none."""
        return max((one.value for one in self._having(name, labels)), default=0.0)

    def values_of(self, label: str) -> list[str]:
        """Every value that a label has, in order of appearance."""
        return list(dict.fromkeys(one.labels[label] for one in self.series if label in one.labels))

    def _having(self, name: str, labels: Mapping[str, str]) -> Iterator[Series]:
        for one in self.series:
            if one.name == name and labels.items() <= one.labels.items():
                yield one


def series_of_snapshot(values: Mapping[str, float]) -> tuple[Series, ...]:
    """The numbers of :meth:`kvkeep.metrics.Metrics.snapshot`; what is no series is left out."""
    found = []
    for text, value in values.items():
        match = _SERIES.fullmatch(text)
        if match is not None and not match[1].endswith("_bucket"):
            labels = dict(_LABEL.findall(match[2] or ""))
            found.append(Series(match[1], labels, value))
    return tuple(found)


def series_of_text(text: str) -> tuple[Series, ...]:
    """The numbers of a page in the Prometheus text format that are kvkeep's.

    Raises:
        ValueError: it is no such page.
    """
    return tuple(
        Series(sample.name, dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("kvkeep_") and not sample.name.endswith(("_bucket", "_created"))
    )


#: Fewer tokens than that were not asked for, as far as a share is concerned.
_ONE_TOKEN = 1.0


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier, over all ranks.

    Attributes:
        name: of the tier.
        found_share: tokens found in it, of all that were asked for since the start.
        load_bytes_per_s: read from it.
        store_bytes_per_s: written to it.
        chunks: that it holds.
        evictions_per_s: chunks that its policy gave up.
        dropped: chunks that it shed, since the start.
        failures: failed calls, since the start.
        state: ``ok``, ``bypassed``, or which breaker is open.
    """

    name: str
    found_share: float
    load_bytes_per_s: float
    store_bytes_per_s: float
    chunks: int
    evictions_per_s: float
    dropped: int
    failures: int
    state: str


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine.

    Attributes:
        engine: its name.
        ranks: workers that answered.
        hit_share: tokens found of those asked for in this interval; None if none were.
        hit_share_since_start: the same since the start; None likewise.
        asked_tokens_per_s: tokens that lookups asked for.
        pool_used_bytes: of all ranks.
        pool_bytes: of all ranks.
        leases: open now.
        leases_expired: since the start.
        load_failed_tokens: found and not loaded, since the start.
        tiers: in the order of the hierarchy.
        failures: (what failed, how often since the start), the most frequent first.
    """

    engine: str
    ranks: int
    hit_share: float | None
    hit_share_since_start: float | None
    asked_tokens_per_s: float
    pool_used_bytes: int
    pool_bytes: int
    leases: int
    leases_expired: int
    load_failed_tokens: int
    tiers: tuple[TierView, ...]
    failures: tuple[tuple[str, int], ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def view_engines(before: Iterable[Sample], now: Iterable[Sample]) -> list[EngineView]:
    """One view per engine that has answered now; rates are 0 where it had not before."""
    old = {sample.worker: sample for sample in before}
    by_engine: dict[str, list[Sample]] = defaultdict(list)
    for sample in now:
        by_engine[sample.engine].append(sample)
    return [
        _view(name, sorted(samples, key=lambda one: one.rank), old)
        for name, samples in sorted(by_engine.items())
    ]


def _view(engine: str, samples: Sequence[Sample], old: Mapping[str, Sample]) -> EngineView:
    # Every rank counts each lookup, so one of them tells the hit rate.
    first = samples[0]
    asked = _moved("kvkeep_lookup_tokens_total", first, old)
    found = _moved("kvkeep_lookup_hit_tokens_total", first, old)
    all_asked = first.total("kvkeep_lookup_tokens_total")
    all_found = first.total("kvkeep_lookup_hit_tokens_total")
    used = _sum(samples, "kvkeep_pool_bytes", state="used")
    return EngineView(
        engine=engine,
        ranks=len(samples),
        hit_share=found / asked if asked >= _ONE_TOKEN else None,
        hit_share_since_start=all_found / all_asked if all_asked >= _ONE_TOKEN else None,
        asked_tokens_per_s=_per_second(asked, first, old),
        pool_used_bytes=int(used),
        pool_bytes=int(used + _sum(samples, "kvkeep_pool_bytes", state="free")),
        leases=int(_sum(samples, "kvkeep_leases_open")),
        leases_expired=int(_sum(samples, "kvkeep_leases_expired_total")),
        load_failed_tokens=int(_sum(samples, "kvkeep_load_failed_tokens_total")),
        tiers=tuple(_tier(name, samples, old) for name in _tier_names(first)),
        failures=_failures(samples),
    )


def _tier(name: str, samples: Sequence[Sample], old: Mapping[str, Sample]) -> TierView:
    first = samples[0]
    asked = first.total("kvkeep_lookup_tokens_total")
    found = first.total("kvkeep_lookup_hit_tokens_total", tier=name)

    def rate(metric: str, **labels: str) -> float:
        return sum(
            _per_second(_moved(metric, one, old, tier=name, **labels), one, old) for one in samples
        )

    return TierView(
        name=name,
        found_share=found / asked if asked >= _ONE_TOKEN else 0.0,
        load_bytes_per_s=rate("kvkeep_transfer_bytes_sum", direction="load"),
        store_bytes_per_s=rate("kvkeep_transfer_bytes_sum", direction="store"),
        chunks=int(_sum(samples, "kvkeep_chunks", tier=name)),
        evictions_per_s=rate("kvkeep_evictions_total"),
        dropped=int(_sum(samples, "kvkeep_dropped_chunks_total", tier=name)),
        failures=int(_sum(samples, "kvkeep_failures_total", tier=name)),
        state=_state(name, samples),
    )


def _tier_names(sample: Sample) -> list[str]:
    """Tiers that hold chunks; others that only fail are not tiers."""
    return list(
        dict.fromkeys(one.labels["tier"] for one in sample.series if one.name == "kvkeep_chunks")
    )


def _state(tier: str, samples: Sequence[Sample]) -> str:
    if any(one.largest("kvkeep_backend_bypassed", tier=tier) for one in samples):
        return "bypassed"
    open_ones = [
        direction
        for direction in ("load", "store")
        if any(
            one.largest("kvkeep_breaker_open", tier=tier, direction=direction) for one in samples
        )
    ]
    return "no " + " or ".join(f"{one}s" for one in open_ones) if open_ones else "ok"


def _failures(samples: Sequence[Sample]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, float] = defaultdict(float)
    for sample in samples:
        for one in sample.series:
            if one.name == "kvkeep_failures_total" and one.value:
                what = " ".join(one.labels.get(key, "") for key in ("tier", "operation", "cause"))
                counts[what] += one.value
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return tuple((what, int(count)) for what, count in ordered)


def _sum(samples: Sequence[Sample], name: str, **labels: str) -> float:
    return sum(one.total(name, **labels) for one in samples)


def _moved(name: str, now: Sample, old: Mapping[str, Sample], **labels: str) -> float:
    """By how much a counter grew; 0 for a worker that is new or was started anew."""
    before = old.get(now.worker)
    if before is None:
        return 0.0
    return max(0.0, now.total(name, **labels) - before.total(name, **labels))


def _per_second(amount: float, now: Sample, old: Mapping[str, Sample]) -> float:
    before = old.get(now.worker)
    if before is None or now.time_s <= before.time_s:
        return 0.0
    return amount / (now.time_s - before.time_s)
