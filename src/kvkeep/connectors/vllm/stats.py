"""What vLLM itself shows of kvkeep: a line in its log, and kvkeep's metrics in its /metrics.

vLLM asks each worker after each step, adds the answers up and carries them to its front end as
plain data. What a worker's metrics have moved by travels so, with the worker's rank as a label, and
is counted again there under ``vllm:`` and the metric's own name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvkeep.metrics.catalogue import CATALOGUE, Kind
from kvkeep.metrics.registry import Metrics, Move

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Before the names of metrics; vLLM takes back what is called so when it starts again.
PREFIX = "vllm:"
#: Parts of ``KVKeepStats.data``.
LOG, MOVED, GAUGES = "log", "moved", "gauges"
#: Between the parts of a series' name as it travels.
_SEPARATOR = "\x1f"


@dataclass(slots=True)
class StepStats:
    """Counters of one worker since they were last taken, for a line in vLLM's log.

    Attributes:
        loaded_tokens: tokens whose KV was written into the engine's blocks.
        stored_tokens: tokens whose KV was copied out of them.
        failed_tokens: tokens promised and not loaded.
        failures: exceptions caught.
    """

    loaded_tokens: int = 0
    stored_tokens: int = 0
    failed_tokens: int = 0
    failures: int = 0


class KVKeepStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """One worker's or several workers' numbers in vLLM's own form.

    ``data`` is plain: ``log`` maps names to sums, ``moved`` series to a sum or, for histograms, to
    what was observed, ``gauges`` series to values. A series is metric, rank and labels in one text.
    """

    @classmethod
    def of(cls, stats: StepStats, *, rank: int = 0, metrics: Metrics | None = None) -> KVKeepStats:
        """What one worker has to tell.

        Args:
            stats: for the log.
            rank: whose.
            metrics: what they have moved by is taken; gauges are read only if something moved.
        """
        moved: dict[str, Any] = {}
        gauges: dict[str, float] = {}
        moves = metrics.take_moves() if metrics is not None else []
        for name, labels, value in moves:
            series = _SEPARATOR.join((name, str(rank), *labels))
            if CATALOGUE[name].kind is Kind.HISTOGRAM:
                moved.setdefault(series, []).append(value)
            else:
                moved[series] = moved.get(series, 0) + value
        if moves and metrics is not None:
            gauges = _series(metrics.gauges(), rank)
        return cls(data={LOG: asdict(stats), MOVED: moved, GAUGES: gauges})

    def reset(self) -> None:
        """Set everything to zero."""
        self.data = {LOG: asdict(StepStats()), MOVED: {}, GAUGES: {}}

    def aggregate(self, other: KVConnectorStats) -> KVKeepStats:
        """Add another worker's or a later step's numbers."""
        if not self.data:
            self.reset()
        log, moved = self.data[LOG], self.data[MOVED]
        for name, value in other.data.get(LOG, {}).items():
            log[name] = log.get(name, 0) + value
        for series, value in other.data.get(MOVED, {}).items():
            moved[series] = moved[series] + value if series in moved else value
        self.data[GAUGES].update(other.data.get(GAUGES, {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The sums, for a line in the log."""
        totals: dict[str, Any] = self.data.get(LOG, {})
        return dict(totals)

    def is_empty(self) -> bool:
        """Nothing happened."""
        return not any(self.data.get(LOG, {}).values()) and not self.data.get(MOVED)


class KVKeepPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is untyped here
    """kvkeep's metrics in vLLM's front end, one series more per engine and rank."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register every metric of the catalogue.

        Args:
            vllm_config: vLLM's.
            metric_types: vLLM's classes for counters, gauges and histograms.
            labelnames: labels that vLLM gives every metric.
            per_engine_labelvalues: their values by engine.
        """
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
        self._families: dict[str, Any] = {}
        for name, spec in CATALOGUE.items():
            options: dict[str, Any] = {"buckets": spec.bounds} if spec.bounds else {}
            self._families[name] = metric_types[kinds[spec.kind]](
                name=PREFIX + name,
                documentation=spec.text,
                labelnames=[*labelnames, "rank", *spec.labels],
                **options,
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what travelled from the workers of one engine."""
        values = self.per_engine_labelvalues[engine_idx]
        for series, moved in transfer_stats_data.get(MOVED, {}).items():
            name, *labels = series.split(_SEPARATOR)
            metric = self._families[name].labels(*values, *labels)
            if isinstance(moved, list):
                for value in moved:
                    metric.observe(value)
            else:
                metric.inc(moved)
        for series, value in transfer_stats_data.get(GAUGES, {}).items():
            name, *labels = series.split(_SEPARATOR)
            self._families[name].labels(*values, *labels).set(value)


def _series(moves: Iterable[Move], rank: int) -> dict[str, float]:
    return {_SEPARATOR.join((name, str(rank), *labels)): value for name, labels, value in moves}
