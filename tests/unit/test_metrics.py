"""What is counted under which name."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.codec.frame import FrameFault
from kvkeep.metrics import Metrics
from kvkeep.metrics.catalogue import INTEGRITY_CAUSES
from kvkeep.metrics.registry import MAX_SERIES
from kvkeep.testing.chunks import make_keys
from support.storage import open_storage, store


def test_every_method_counts_under_its_documented_name():
    metrics = Metrics()
    metrics.lookup(asked=1000, found={"LocalCPUBackend": 512, "DictBackend": 256})
    metrics.lookup_failed(24, "timeout")
    metrics.lookup_took(0.5)
    metrics.stored(256, 4096, 0.5)
    metrics.loaded({"DictBackend": 128, "LocalCPUBackend": 64}, 2048, 0.25)
    metrics.moved("DictBackend", "load", 1024, 0.125)
    metrics.store_skipped(3, "tail")
    metrics.dropped("DictBackend", "no_room", 2)
    metrics.evicted("LocalCPUBackend", 7)
    metrics.failure("DictBackend", "get", "timeout")
    metrics.failure("DictBackend", "get", "truncated")
    metrics.load_failed(64, "lease")
    metrics.lease_expired()
    metrics.prefetched("ready")
    assert {name: value for name, value in metrics.snapshot().items() if value} == {
        "kvkeep_lookup_tokens_total": 1024,
        'kvkeep_lookup_hit_tokens_total{tier="LocalCPUBackend"}': 512,
        'kvkeep_lookup_hit_tokens_total{tier="DictBackend"}': 256,
        'kvkeep_lookup_failed_tokens_total{cause="timeout"}': 24,
        "kvkeep_lookup_seconds_count": 1,
        "kvkeep_lookup_seconds_sum": 0.5,
        "kvkeep_stored_tokens_total": 256,
        'kvkeep_loaded_tokens_total{tier="DictBackend"}': 128,
        'kvkeep_loaded_tokens_total{tier="LocalCPUBackend"}': 64,
        **moved("LocalCPUBackend", "store", 4096, 0.5),
        **moved("LocalCPUBackend", "load", 2048, 0.25),
        **moved("DictBackend", "load", 1024, 0.125),
        'kvkeep_store_skipped_tokens_total{cause="tail"}': 3,
        'kvkeep_dropped_chunks_total{tier="DictBackend",cause="no_room"}': 2,
        'kvkeep_evictions_total{tier="LocalCPUBackend"}': 7,
        'kvkeep_failures_total{tier="DictBackend",operation="get",cause="timeout"}': 1,
        'kvkeep_failures_total{tier="DictBackend",operation="get",cause="truncated"}': 1,
        'kvkeep_integrity_failures_total{tier="DictBackend",cause="truncated"}': 1,
        'kvkeep_load_failed_tokens_total{cause="lease"}': 64,
        "kvkeep_leases_expired_total": 1,
        'kvkeep_prefetches_total{outcome="ready"}': 1,
    }


def moved(tier: str, direction: str, num_bytes: int, seconds: float) -> dict[str, float]:
    labels = f'{{tier="{tier}",direction="{direction}"}}'
    return {
        f"kvkeep_transfer_bytes_count{labels}": 1,
        f"kvkeep_transfer_bytes_sum{labels}": num_bytes,
        f"kvkeep_transfer_seconds_count{labels}": 1,
        f"kvkeep_transfer_seconds_sum{labels}": seconds,
    }


def test_every_fault_of_a_chunks_bytes_counts_as_one_of_integrity():
    assert {fault.value for fault in FrameFault} <= INTEGRITY_CAUSES
    metrics = Metrics()
    for cause in ("timeout", "missing", "io_error", "queue_full"):
        metrics.failure("DictBackend", "get", cause)
    assert not any("integrity" in name for name in metrics.snapshot())


def test_causes_without_end_become_one_series():
    metrics = Metrics()
    metrics.follow()
    for number in range(3 * MAX_SERIES):
        metrics.failure("DictBackend", "get", f"Error{number}")
    counts = [v for k, v in metrics.snapshot().items() if k.startswith("kvkeep_failures_total")]
    assert len(counts) == MAX_SERIES + 1
    assert sum(counts) == 3 * MAX_SERIES
    assert len({labels for _, labels, _ in metrics.take_moves()}) == MAX_SERIES + 1


def test_the_hit_rate_counts_misses():
    """Fault 47: the hit rate is taken at the lookup, where misses arrive too."""
    metrics = Metrics()
    assert metrics.hit_rate() == 0.0
    metrics.lookup(asked=100, found={"LocalCPUBackend": 50})
    assert metrics.hit_rate() == 0.5
    metrics.lookup(asked=100, found={})
    assert metrics.hit_rate() == 0.25
    metrics.lookup(asked=200, found={"LocalCPUBackend": 100, "DictBackend": 50})
    assert metrics.hit_rate() == 0.5


def test_nothing_moves_while_nothing_happens():
    """Fault 47: counters do not grow by being looked at."""
    with open_storage() as manager:
        store(manager, make_keys(3))
        metrics = manager.metrics
        before = metrics.snapshot()
        metrics.exposition()
        assert metrics.snapshot() == before


def test_gauges_are_read_from_their_owners():
    with open_storage(capacity=8) as manager:
        keys = make_keys(3)
        store(manager, keys)
        lease = manager.leases.open("one")
        manager.leases.keep("one", lease)
        snapshot = manager.metrics.snapshot()
        report = manager.memcheck()
        assert snapshot['kvkeep_chunks{tier="LocalCPUBackend"}'] == 3
        assert snapshot['kvkeep_pool_bytes{state="used"}'] == report.used_bytes > 0
        assert snapshot['kvkeep_pool_bytes{state="free"}'] == report.free_bytes > 0
        assert snapshot["kvkeep_leases_open"] == 1
        manager.leases.release_all()
        assert manager.metrics.snapshot()["kvkeep_leases_open"] == 0


def test_the_exposition_is_prometheus_text():
    metrics = Metrics()
    metrics.lookup(asked=5, found={'a"b\\c\n': 5})
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics.exposition().decode())
    }
    assert families["kvkeep_lookup_tokens"].samples[0].value == 5
    assert families["kvkeep_lookup_hit_tokens"].samples[0].labels == {"tier": 'a"b\\c\n'}
    assert all(family.documentation for name, family in families.items() if "created" not in name)


def test_two_engines_share_nothing_unless_asked_to():
    registry = CollectorRegistry()
    mine, other = Metrics(registry), Metrics()
    mine.lookup(asked=5, found={})
    assert other.snapshot()["kvkeep_lookup_tokens_total"] == 0
    assert registry.get_sample_value("kvkeep_lookup_tokens_total") == 5


def test_counting_from_many_threads_loses_nothing():
    metrics = Metrics()

    def work():
        for _ in range(500):
            metrics.lookup(asked=2, found={"LocalCPUBackend": 1})

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.snapshot()["kvkeep_lookup_tokens_total"] == 8000
    assert metrics.hit_rate() == 0.5
