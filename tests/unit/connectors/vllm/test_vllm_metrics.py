"""What vLLM's own metrics say about kvkeep: the same numbers, and where hits came from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvkeep.connectors.vllm import KVKeepConnector
from kvkeep.connectors.vllm.scheduler import hit_sources
from kvkeep.connectors.vllm.stats import KVKeepStats, StepStats
from kvkeep.engine.results import FoundTokens
from kvkeep.metrics import Metrics
from kvkeep.metrics.catalogue import CATALOGUE

PROMPT = list(range(40))
CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"


class FrontEnd:
    """The part of vLLM's front end that shows metrics, with a registry of its own."""

    def __init__(self, engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        types = {
            kind: lambda kind=kind, **options: kind(registry=self.registry, **options)
            for kind in (Counter, Gauge, Histogram)
        }
        self.metrics = KVKeepConnector.build_prom_metrics(
            SimpleNamespace(kv_transfer_config=None),
            types,
            ["model_name", "engine"],
            {number: ["m", str(number)] for number in range(engines)},
        )

    def observe(self, stats: KVKeepStats, engine: int = 0) -> None:
        """Carry the numbers as vLLM does: as data, over msgpack."""
        data = MsgpackDecoder(dict).decode(MsgpackEncoder().encode(stats.to_dict()))
        self.metrics.observe(data, engine)

    def values(self) -> dict[str, float]:
        """As Metrics.snapshot has it, without vLLM's own labels."""
        found = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name.endswith(("_created", "_bucket")):
                    continue
                labels = {
                    k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")
                }
                assert labels.pop("rank") == "0"
                text = ",".join(f'{name}="{value}"' for name, value in labels.items())
                found[sample.name + (f"{{{text}}}" if text else "")] = sample.value
        return found


def test_vllms_metrics_have_the_numbers_of_kvkeeps(toy_engine):
    engine = toy_engine()
    front = FrontEnd()
    for req_id in ("a", "b", "c"):
        engine.generate(req_id, PROMPT)
        front.observe(engine.worker.get_kv_connector_stats())
    assert engine.metric("kvkeep_lookup_tokens_total") == 120
    front.observe(engine.worker.get_kv_connector_stats())
    mine = engine.engine.metrics.snapshot()
    shown = front.values()
    assert shown['vllm:kvkeep_loaded_tokens_total{tier="LocalCPUBackend"}'] == 80
    expected = {f"vllm:{name}": value for name, value in mine.items()}
    assert {name: value for name, value in shown.items() if value} == {
        name: value for name, value in expected.items() if value
    }
    engine.finish()


def test_every_metric_travels():
    metrics = Metrics()
    metrics.follow()
    for name, spec in CATALOGUE.items():
        labels = tuple(f"x{number}" for number in range(len(spec.labels)))
        if spec.kind == "counter":
            metrics._add(name, 2, *labels)
        elif spec.kind == "histogram":
            metrics._observe(name, 2, *labels)
        else:
            metrics._watch(name, lambda: 2, *labels)
    front = FrontEnd()
    front.observe(KVKeepStats.of(StepStats(), metrics=metrics))
    shown = front.values()
    for name, value in metrics.snapshot().items():
        assert shown[f"vllm:{name}"] == value > 0, name
    assert KVKeepStats.of(StepStats(), metrics=metrics).is_empty()


def test_workers_and_steps_add_up_and_ranks_stay_apart():
    parts = []
    for rank in range(2):
        metrics = Metrics()
        metrics.follow()
        metrics.lookup(asked=10, found={CPU: 5 + rank})
        metrics.moved(CPU, "load", 1 << 20, 0.5)
        parts.append(KVKeepStats.of(StepStats(loaded_tokens=5), rank=rank, metrics=metrics))
    total = KVKeepConnector.build_kv_connector_stats().aggregate(parts[0]).aggregate(parts[1])
    total = total.aggregate(parts[0])
    assert total.reduce()["loaded_tokens"] == 15
    front = FrontEnd(engines=2)
    front.metrics.observe(total.to_dict(), 1)
    read = front.registry.get_sample_value
    labels = {"model_name": "m", "engine": "1", "tier": CPU}
    name = "vllm:kvkeep_lookup_hit_tokens_total"
    assert read(name, {**labels, "rank": "0"}) == 10
    assert read(name, {**labels, "rank": "1"}) == 6
    labels["direction"] = "load"
    assert read("vllm:kvkeep_transfer_bytes_count", {**labels, "rank": "0"}) == 2
    assert read("vllm:kvkeep_transfer_bytes_sum", {**labels, "rank": "1"}) == 1 << 20


def test_the_line_in_vllms_log(toy_engine):
    engine = toy_engine()
    engine.generate("a", PROMPT)
    lines = []
    log = KVConnectorLogging(None)
    log.connector_cls = KVKeepConnector
    log.observe(engine.worker.get_kv_connector_stats().to_dict())
    log.log(lambda text, *args: lines.append(text % args))
    (line,) = lines
    assert "stored_tokens=40" in line
    log.log(lambda text, *args: lines.append(text % args))
    assert len(lines) == 1
    engine.finish()


@pytest.mark.parametrize(
    ("start", "num_tokens", "expected"),
    [
        (0, 16, {CacheHitSource.HOST: 12, CacheHitSource.DISK: 4}),
        (8, 7, {CacheHitSource.DISK: 4, CacheHitSource.HOST: 3}),
        (4, 4, {CacheHitSource.HOST: 4}),
        (8, 2, {CacheHitSource.DISK: 2}),
        (16, 4, {CacheHitSource.EXTERNAL_UNSPECIFIED: 4}),
        (4, 0, {}),
    ],
)
def test_sources_of_a_part_of_what_was_found(start, num_tokens, expected):
    found = FoundTokens([(CPU, 8), (DISK, 4), (CPU, 4)])
    assert hit_sources(found, start, num_tokens) == expected
    assert sum(expected.values()) == num_tokens


def test_vllm_hears_which_tier_its_hits_came_from(toy_engine, tmp_path):
    engine = toy_engine(extra={"disk.path": str(tmp_path)})
    seen = []
    ask = engine.connector.get_external_cache_hit_sources

    def note(request, num_tokens):
        seen.append((num_tokens, ask(request, num_tokens)))
        return seen[-1][1]

    engine.connector.get_external_cache_hit_sources = note
    engine.generate("a", PROMPT)
    engine.generate("b", PROMPT)
    storage = engine.worker._worker._manager.storage
    assert storage.storage_backends[DISK].flush(30)
    storage.clear([CPU])
    engine.generate("c", PROMPT)
    assert seen == [(39, {CacheHitSource.HOST: 39}), (39, {CacheHitSource.DISK: 39})]
    engine.finish()


def test_vllms_own_logger_shows_them(toy_engine):
    """What `vllm serve` does with a step's numbers, twice in one process."""
    for _ in range(2):
        engine = toy_engine()
        logger = PrometheusStatLogger(engine.scheduler.vllm_config, [0])
        for req_id in ("a", "b"):
            engine.generate(req_id, PROMPT)
        assert engine.metric("kvkeep_lookup_tokens_total") == 80
        moved = engine.worker.get_kv_connector_stats()
        logger.record(SchedulerStats(kv_connector_stats=moved.to_dict()), None, engine_idx=0)
        shown = {
            (metric.name, metric.labels.get("tier"), metric.labels.get("direction")): metric
            for metric in get_metrics_snapshot()
            if metric.name.startswith("vllm:kvkeep_")
        }
        assert shown["vllm:kvkeep_stored_tokens", None, None].value == 40
        assert shown["vllm:kvkeep_lookup_hit_tokens", CPU, None].value == 40
        assert shown["vllm:kvkeep_transfer_bytes", CPU, "load"].count == 1
        assert shown["vllm:kvkeep_chunks", CPU, None].value == 5
        engine.finish()
    unregister_vllm_metrics()
