"""Sample: all numbers of one worker at one moment. Immutable values and pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
