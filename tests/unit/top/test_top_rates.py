"""From two samples of each rank to one view of the engine."""

from __future__ import annotations

import pytest

from kvkeep.metrics import Metrics
from kvkeep.top.rates import Sample, series_of_snapshot, series_of_text, view_engines


def sample(metrics, rank=0, time_s=0.0, engine="e"):
    series = series_of_snapshot(metrics.snapshot())
    return Sample(f"{engine}-{rank}", engine, rank, time_s, series)


def counting(*, tier="LocalCPUBackend", chunks=0):
    metrics = Metrics()
    metrics.watch_chunks(tier, lambda: chunks)
    metrics.watch_pool(lambda: 30.0, lambda: 70.0)
    return metrics


def test_what_moved_between_two_looks_is_a_rate_and_the_rest_a_sum():
    metrics = counting(chunks=5)
    metrics.lookup(asked=100, found={"LocalCPUBackend": 50})
    before = sample(metrics)
    metrics.lookup(asked=100, found={"LocalCPUBackend": 90})
    metrics.moved("LocalCPUBackend", "load", 4000, 0.1)
    metrics.evicted("LocalCPUBackend", 6)
    [view] = view_engines([before], [sample(metrics, time_s=2.0)])
    assert (view.hit_share, view.hit_share_since_start) == (0.9, 0.7)
    assert view.asked_tokens_per_s == 50
    assert (view.pool_used_bytes, view.pool_bytes) == (30, 100)
    [tier] = view.tiers
    assert (tier.load_bytes_per_s, tier.store_bytes_per_s) == (2000, 0)
    assert (tier.evictions_per_s, tier.chunks, tier.found_share) == (3, 5, 0.7)


def test_ranks_add_up_but_each_lookup_counts_once():
    ranks = [counting(chunks=2), counting(chunks=3)]
    before = [sample(metrics, rank) for rank, metrics in enumerate(ranks)]
    for metrics in ranks:
        metrics.lookup(asked=10, found={"LocalCPUBackend": 4})
        metrics.moved("LocalCPUBackend", "store", 100, 0.1)
    now = [sample(metrics, rank, 1.0) for rank, metrics in enumerate(ranks)]
    [view] = view_engines(before, reversed(now))
    assert (view.ranks, view.hit_share, view.asked_tokens_per_s) == (2, 0.4, 10)
    assert (view.tiers[0].chunks, view.tiers[0].store_bytes_per_s) == (5, 200)
    assert view.pool_bytes == 200


def test_a_worker_that_is_new_or_was_started_anew_has_no_rates():
    old, new = counting(), counting()
    old.lookup(asked=100, found={})
    new.lookup(asked=10, found={"LocalCPUBackend": 10})
    [view] = view_engines([], [sample(new)])
    assert (view.hit_share, view.asked_tokens_per_s) == (None, 0)
    [view] = view_engines([sample(old)], [sample(new, time_s=1.0)])
    assert (view.hit_share, view.asked_tokens_per_s) == (None, 0)
    assert view.hit_share_since_start == 1.0


def test_before_the_first_lookup_there_is_no_hit_rate():
    [view] = view_engines([], [sample(counting())])
    assert view.hit_share is view.hit_share_since_start is None
    assert view.tiers[0].found_share == 0.0


def test_engines_are_kept_apart():
    views = view_engines([], [sample(counting(), engine="b"), sample(counting(), engine="a")])
    assert [view.engine for view in views] == ["a", "b"]


@pytest.mark.parametrize(
    "bypassed, loads, stores, state",
    [
        (0, 0, 0, "ok"),
        (1, 1, 0, "bypassed"),
        (0, 1, 0, "no loads"),
        (0, 0, 1, "no stores"),
        (0, 1, 1, "no loads or stores"),
    ],
)
def test_the_state_of_a_tier(bypassed, loads, stores, state):
    metrics = counting()
    metrics.watch_bypass("LocalCPUBackend", lambda: bypassed)
    metrics.watch_breaker("LocalCPUBackend", "load", lambda: loads)
    metrics.watch_breaker("LocalCPUBackend", "store", lambda: stores)
    [view] = view_engines([], [sample(metrics)])
    assert view.tiers[0].state == state


def test_failures_are_listed_with_the_most_frequent_first():
    metrics = counting()
    metrics.failure("LocalDiskBackend", "put", "queue_full")
    for _ in range(3):
        metrics.failure("RemoteBackend", "get", "timeout")
    [view] = view_engines([], [sample(metrics)])
    assert view.failures == (
        ("RemoteBackend get timeout", 3),
        ("LocalDiskBackend put queue_full", 1),
    )


def test_a_snapshot_and_a_page_hold_the_same_numbers():
    metrics = counting(chunks=7)
    metrics.lookup(asked=10, found={"LocalCPUBackend": 4})
    metrics.moved("LocalCPUBackend", "load", 1 << 20, 0.25)
    metrics.failure("RemoteBackend", "get", "timeout")
    numbers = {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for one in series_of_text(metrics.exposition().decode())
    }
    snapshot = series_of_snapshot(metrics.snapshot())
    assert len(snapshot) > 10
    for one in snapshot:
        assert numbers[one.name, tuple(sorted(one.labels.items()))] == one.value
