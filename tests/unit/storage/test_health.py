"""The bypass follows the tiers' health."""

from __future__ import annotations

from kvkeep.backends.reference import DictBackend
from kvkeep.storage.health import HealthMonitor
from kvkeep.testing.chunks import make_keys
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend
from support.storage import open_storage, store

L1, L2 = "LocalCPUBackend", "DictBackend"


def test_a_tier_is_left_out_until_it_recovers():
    """Fault 33: one dead tier never switches off the others."""
    faults = [Fault("health", FaultKind.RAISE, 1, 1), Fault("health", FaultKind.DROP, 2, 1)]
    with open_storage(lambda pool: [FaultyBackend(DictBackend(pool), faults)]) as manager:
        monitor = HealthMonitor(manager)
        keys = make_keys(4)
        expected = [frozenset(), frozenset({L2}), frozenset({L2}), frozenset()]
        for key, bypassed in zip(keys, expected, strict=True):
            answers = monitor.check_once()
            assert manager.bypassed == bypassed
            assert answers[L1].healthy
            assert answers[L2].healthy == (not bypassed)
            assert set(store(manager, [key])) == {L1, L2} - bypassed
        assert manager.batched_contains(keys, [L1]) == 4
        assert sorted(manager.storage_backends[L2].keys()) == sorted([keys[0], keys[3]])
        failures = (
            'kvkeep_failures_total{tier="DictBackend",operation="health",cause="BackendError"}'
        )
        assert manager.metrics.snapshot()[failures] == 1
