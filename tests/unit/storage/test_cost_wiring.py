"""The cost rule in a storage manager: every way to load goes through it, nothing else does."""

from __future__ import annotations

import pytest

from kvkeep.backends.reference import DictBackend
from kvkeep.hashing import split_layers
from kvkeep.metrics import Metrics
from kvkeep.storage.cost import TOO_SLOW, CostOptions
from kvkeep.storage.manager import StorageManager
from kvkeep.testing.chunks import CHUNK_BYTES, make_keys, make_pool, put
from kvkeep.testing.faulty import FaultyBackend
from support.storage import check_quiet

CPU, LOWER = "LocalCPUBackend", "DictBackend"
KEYS = make_keys(6)
TOKENS = 4
SKIPPED = f'kvkeep_tier_skipped_tokens_total{{tier="{LOWER}",cause="{TOO_SLOW}"}}'
#: An engine that computes faster than any tier loads, and one that is slower than every tier.
QUICK_S, SLOW_S = 1e-9, 1e6


class Rig:
    """Two chunks in memory, all six in a lower tier, whose calls are counted."""

    def __init__(self, computing_s: float) -> None:
        self.metrics = Metrics()
        self.pool = make_pool(12, self.metrics)
        self.lower = FaultyBackend(DictBackend(self.pool))
        self.storage = StorageManager(
            [self.pool, self.lower],
            allocator_backend=self.pool,
            metrics=self.metrics,
            cost=CostOptions(TOKENS, CHUNK_BYTES, retry_s=3600.0),
        )
        put(self.lower, self.pool, KEYS)
        put(self.pool, self.pool, KEYS[:2])
        self.storage.cost.note_prefill(TOKENS, TOKENS * computing_s)

    def measure(self) -> None:
        """The lower tier has loaded something, so that its speed is known."""
        for obj in self.storage.batched_get(KEYS[4:], LOWER):
            obj.ref_count_down()
        self.pool.batched_remove(KEYS[4:])

    def asked(self) -> int:
        """Calls of the lower tier that look for chunks."""
        return self.lower.calls["contains"]

    def skipped(self) -> float:
        return self.metrics.snapshot().get(SKIPPED, 0.0)


@pytest.fixture
def rig(request):
    made = Rig(request.param)
    yield made
    check_quiet(made.storage, made.pool)
    made.storage.close()


def look_up(rig, way):
    """Chunks that are found and loaded by one of the ways there are."""
    if way == "pinned":
        lease = rig.storage.leases.open("a")
        found = rig.storage.batched_contains(KEYS, pin=lease)
        lease.release()
        return found
    if way == "unpinned load":
        runs = rig.storage.get_block_mapping(KEYS, to_load=True)
        return runs[-1].end
    lengths = [TOKENS * count for count in range(len(KEYS) + 1)]
    answer = rig.storage.async_lookup_and_prefetch("a", KEYS, lengths).result(20)
    rig.storage.batched_unpin("a")
    return answer.num_tokens // TOKENS


WAYS = ["pinned", "unpinned load", "asynchronous"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rig", [QUICK_S], indirect=True)
def test_a_tier_that_does_not_pay_is_not_asked(rig, way):
    """Fault 42: what is in memory is found, and nothing more."""
    rig.measure()
    asked = rig.asked()
    assert look_up(rig, way) == 2
    assert rig.asked() == asked
    assert rig.skipped() >= 4 * TOKENS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rig", [SLOW_S], indirect=True)
def test_a_tier_that_pays_is_asked(rig, way):
    rig.measure()
    assert look_up(rig, way) == 6
    assert rig.skipped() == 0


@pytest.mark.parametrize("way", ["pinned", "asynchronous"])
@pytest.mark.parametrize("rig", [QUICK_S], indirect=True)
def test_the_first_load_teaches(rig, way):
    """Nothing is known of the tier, so it is asked; then it is known to be too slow."""
    assert look_up(rig, way) == 6
    rig.pool.batched_remove(KEYS[2:])
    assert look_up(rig, way) == 2


@pytest.mark.parametrize("rig", [QUICK_S], indirect=True)
def test_whoever_only_wants_to_know_is_answered(rig):
    """A lookup without a pin loads nothing, and a store must know what is stored already."""
    rig.measure()
    assert rig.storage.batched_contains(KEYS) == 6
    assert rig.storage.contains(KEYS[5]) == LOWER
    assert rig.skipped() == 0


@pytest.mark.parametrize(("rig", "known"), [(QUICK_S, 2), (SLOW_S, 6)], indirect=["rig"])
def test_a_store_brings_into_memory_what_lookups_leave_out(rig, known):
    """Or a prompt that only a slow tier has would be computed each time, and never kept."""
    rig.measure()
    assert rig.storage.known_run(KEYS) == known
    assert rig.skipped() == 0


@pytest.mark.parametrize("rig", [QUICK_S], indirect=True)
def test_a_layerwise_load_teaches_too(rig):
    layers = list(zip(*[split_layers(key, 3) for key in KEYS[4:]], strict=True))
    futures = list(rig.storage.layerwise_batched_get(layers, LOWER))
    for obj in futures[0].result(20):
        obj.ref_count_down()
    rig.pool.batched_remove(KEYS[4:])
    assert look_up(rig, "pinned") == 2
