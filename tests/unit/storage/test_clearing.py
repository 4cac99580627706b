"""What was cleared stays away, also in tiers that were left out or failed when it was cleared."""

from __future__ import annotations

import pytest

from kvkeep.backends.reference import DictBackend
from kvkeep.storage.health import HealthMonitor
from kvkeep.testing.engine_rig import EngineRig
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend

TOKENS = list(range(1000, 1032))
L2 = "DictBackend"


def rig_over(*faults: Fault) -> EngineRig:
    return EngineRig(tiers=[lambda first: FaultyBackend(DictBackend(first), faults)])


def test_a_tier_that_was_left_out_is_cleared_before_it_is_back() -> None:
    with rig_over(Fault("health", FaultKind.DROP, 0, 1)) as rig:
        rig.fill(TOKENS)
        monitor = HealthMonitor(rig.storage)
        monitor.check_once()
        assert rig.storage.bypassed == {L2}
        assert rig.engine.clear() == 4  # of the first tier
        monitor.check_once()
        assert rig.storage.bypassed == frozenset()
        assert rig.engine.lookup(TOKENS) == 0


def test_a_tier_that_cannot_be_cleared_is_left_out_until_it_can() -> None:
    with rig_over(Fault("clear", FaultKind.RAISE, 0, 2)) as rig:
        rig.fill(TOKENS)
        assert rig.engine.clear() == 4
        assert rig.engine.lookup(TOKENS) == 0
        assert rig.storage.bypassed == {L2}
        monitor = HealthMonitor(rig.storage)
        assert not monitor.check_once()[L2].healthy
        assert rig.storage.bypassed == {L2}
        assert monitor.check_once()[L2].healthy
        assert rig.storage.bypassed == frozenset()
        assert rig.engine.lookup(TOKENS) == 0
        rig.fill(TOKENS)
        assert rig.engine.lookup(TOKENS, search_range=[L2]) == 32


def test_only_the_tiers_that_were_named_owe_anything() -> None:
    with rig_over() as rig:
        rig.fill(TOKENS)
        rig.storage.set_bypassed(L2, True)
        assert rig.engine.clear(["LocalCPUBackend"]) == 4
        rig.storage.set_bypassed(L2, False)
        assert rig.engine.lookup(TOKENS) == 32
        with pytest.raises(ValueError, match="no tier is called"):
            rig.engine.clear(["nowhere"])
