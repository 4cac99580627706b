"""What was cleared stays away, also in tiers that were left out or failed when it was cleared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvkeep.backends.base import Lease
from kvkeep.backends.reference import DictBackend
from kvkeep.hashing import ChunkKey, LayerKey
from kvkeep.memory.base import MemoryObj, References
from kvkeep.storage.health import HealthMonitor
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend
from support.engine_rig import EngineRig

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


def test_a_tier_takes_part_in_nothing_while_it_is_cleared() -> None:
    """What it still has is not found, and nothing comes into it. The first one goes on."""
    seen: list[int] = []

    class Clearing(DictBackend):
        def clear(self) -> int:
            seen.append(rig.engine.lookup(TOKENS))
            rig.fill(TOKENS)
            seen.append(rig.engine.lookup(TOKENS, search_range=[L2]))
            seen.append(rig.engine.lookup(TOKENS))
            return super().clear()

    with EngineRig(tiers=[Clearing]) as rig:
        rig.fill(TOKENS)
        assert rig.engine.clear() == 12  # what came meanwhile goes with the rest
        assert seen == [0, 0, 32]
        assert rig.storage.bypassed == frozenset()
        assert rig.engine.lookup(TOKENS) == 0
        rig.fill(TOKENS)
        assert rig.engine.lookup(TOKENS, search_range=[L2]) == 32


def test_a_clear_that_is_interrupted_leaves_no_tier_out() -> None:
    class Interrupted(DictBackend):
        interrupts = True

        def clear(self) -> int:
            if self.interrupts:
                raise KeyboardInterrupt
            return super().clear()

    with EngineRig(tiers=[Interrupted]) as rig:
        rig.fill(TOKENS)
        with pytest.raises(KeyboardInterrupt):
            rig.engine.clear()
        assert rig.engine.lookup(TOKENS, search_range=[L2]) == 32
        Interrupted.interrupts = False
        assert rig.engine.clear() == 4


class PromotingBackend(DictBackend):
    """What a lookup pins is offered to the first tier, as disk and remote do."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def contains(self, key: ChunkKey, *, pin: Lease | None = None) -> bool:
        found = super().contains(key, pin=pin)
        obj = pin.get(key) if pin is not None else None
        if obj is not None:
            with References([obj]):
                self.get_allocator_backend().batched_submit_put_task([key], [obj])
        return found


class AskedWhileCleared(PromotingBackend):
    """Somebody uses the tier at the moment when it is about to be cleared."""

    def clear(self) -> int:
        self.meanwhile()
        return super().clear()


class ClearedWhileAsked(PromotingBackend):
    """Everything is cleared at the moment when the tier has read something and not answered."""

    def _load(self, keys: Sequence[ChunkKey], *, busy_loop: bool) -> list[MemoryObj | None]:
        objs = super()._load(keys, busy_loop=busy_loop)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return objs


USES = {
    "lookup": lambda rig: rig.engine.lookup(TOKENS, lookup_id="r", pin=True),
    "get": lambda rig: [
        obj.ref_count_down() for obj in rig.storage.batched_get(chunk_keys(rig), L2) if obj
    ],
    "layerwise": lambda rig: [
        obj.ref_count_down()
        for obj in next(
            rig.storage.layerwise_batched_get([[LayerKey(key, 0) for key in chunk_keys(rig)]], L2)
        ).result(5)
        if obj
    ],
    "prefetch": lambda rig: rig.engine.async_lookup(TOKENS, lookup_id="r").result(5),
}


def chunk_keys(rig: EngineRig) -> list[ChunkKey]:
    return rig.engine.token_database.process_tokens(TOKENS).keys


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", [AskedWhileCleared, ClearedWhileAsked])
def test_what_is_read_while_it_is_cleared_does_not_come_back(kind, use) -> None:
    with EngineRig(tiers=[kind]) as rig:
        tier = rig.storage.storage_backends[L2]
        rig.fill(TOKENS)
        rig.storage.clear(["LocalCPUBackend"])
        if kind is AskedWhileCleared:
            tier.meanwhile = lambda: USES[use](rig)
            rig.engine.clear()
        else:
            tier.meanwhile = rig.engine.clear
            USES[use](rig)
        rig.engine.lookup_unpin("r")
        assert rig.engine.lookup(TOKENS) == 0
        assert len(rig.storage.allocator_backend.keys()) == 0
