"""What lookups came to reaches the workers' metrics, as the scheduler knows it."""

from __future__ import annotations

import time

from kvkeep.engine.results import FoundTokens

ASKED = "kvkeep_lookup_tokens_total"


def found_by(tier: str) -> str:
    return f'kvkeep_lookup_hit_tokens_total{{tier="{tier}"}}'


def failed_by(cause: str) -> str:
    return f'kvkeep_lookup_failed_tokens_total{{cause="{cause}"}}'


def counted(service, rank: int = 0) -> dict[str, float]:
    service.client.check()  # answered after everything that was sent before
    values = service.metrics[rank].snapshot()
    return {name: value for name, value in values.items() if name.startswith("kvkeep_lookup_")}


def lookups_of(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if "seconds" not in name and value}


def tiers(*runs: tuple[str, int]) -> FoundTokens:
    return FoundTokens(runs)


def test_the_tiers_of_what_was_found_reach_the_client(start):
    service = start(0)
    service.targets[0].stored = tiers(("memory", 8), ("disk", 4), ("memory", 4))
    found = service.client.lookup("r#0", list(range(20)))
    assert (found, found.tiers) == (16, (("memory", 8), ("disk", 4), ("memory", 4)))
    assert lookups_of(counted(service)) == {
        ASKED: 20,
        found_by("memory"): 12,
        found_by("disk"): 4,
    }


def test_every_rank_counts_what_all_ranks_had(start):
    """The hit rate is that of the answer, not that of the rank that knows most."""
    service = start(0, 0)
    service.targets[0].stored = tiers(("memory", 12))
    service.targets[1].stored = tiers(("memory", 4), ("disk", 4))
    found = service.client.lookup("r#0", list(range(16)))
    assert (found, found.tiers) == (8, (("memory", 4), ("disk", 4)))
    for rank in range(2):
        expected = {ASKED: 16, found_by("memory"): 4, found_by("disk"): 4}
        assert lookups_of(counted(service, rank)) == expected


def test_a_lookup_that_timed_out_is_asked_for_and_not_found(start):
    """Fault 47: lookups that nobody waited for were in neither part of the hit rate."""
    service = start(16, timeout_s=0.2)
    service.targets[0].gate.clear()
    assert service.client.lookup("r#0", list(range(16))) == 0
    assert service.client.lookup("r#1", list(range(12))) == 0  # not even asked
    service.targets[0].gate.set()
    deadline = time.monotonic() + 30
    while not service.client.lookup("r#2", list(range(8))):
        assert time.monotonic() < deadline
    values = lookups_of(counted(service))
    assert values[failed_by("timeout")] >= 16
    assert values[failed_by("down")] >= 12
    assert values[found_by("unknown")] == 8, "the late answer counts as the miss that it was"
    assert values[ASKED] == 8 + values[failed_by("timeout")] + values[failed_by("down")]


def test_a_lookup_that_failed_is_asked_for_and_not_found(start):
    service = start(16)
    service.targets[0].error = ValueError("bad")
    assert service.client.lookup("r#0", list(range(16))) == 0
    service.targets[0].error = None
    assert lookups_of(counted(service)) == {ASKED: 16, failed_by("error"): 16}


def test_what_is_asked_again_is_not_counted_again(start):
    service = start(16)
    service.client.lookup("r#0", list(range(16)))
    for number in range(1, 5):
        service.client.lookup(f"r#{number}", list(range(16)), counted=False)
    assert lookups_of(counted(service)) == {ASKED: 16, found_by("unknown"): 16}


def test_the_first_tokens_of_what_was_found():
    found = tiers(("memory", 8), ("disk", 4), ("memory", 4))
    assert found == 16
    assert found.first(8).tiers == (("memory", 8),)
    assert found.first(10).tiers == (("memory", 8), ("disk", 2))
    assert found.first(99).tiers == found.tiers
    assert found.first(0).tiers == ()
