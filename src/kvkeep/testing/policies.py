"""PolicyContract: what every cache policy must do, as a pytest class.

Subclass it, override the fixture ``make_policy``, and pytest runs all of it:

    class TestMyPolicy(PolicyContract):
        @pytest.fixture
        def make_policy(self):
            return MyPolicy
"""

from __future__ import annotations

import random
from collections.abc import Callable, MutableMapping, Sequence

import pytest

from kvkeep.hashing import ChunkKey
from kvkeep.policy.base import CachePolicy

MakePolicy = Callable[[], CachePolicy[bool]]


def make_key(number: int) -> ChunkKey:
    """A key with a number."""
    return ChunkKey(number.to_bytes(32, "big"))


class PolicyRun:
    """A policy with its mapping, called as a backend calls it; a value True may be evicted."""

    def __init__(self, policy: CachePolicy[bool]) -> None:
        self.policy = policy
        self.mapping: MutableMapping[ChunkKey, bool] = policy.init_mutable_mapping()

    def put(self, *numbers: int, idle: bool = True) -> None:
        """Chunks come in, one after the other."""
        for number in numbers:
            self.mapping[make_key(number)] = idle
            self.policy.update_on_put(make_key(number))

    def hit(self, *numbers: int) -> None:
        """Chunks are used, one after the other."""
        for number in numbers:
            self.policy.update_on_hit(make_key(number), self.mapping)

    def evict(self, *numbers: int) -> None:
        """Chunks go."""
        for number in numbers:
            del self.mapping[make_key(number)]
            self.policy.update_on_force_evict(make_key(number))

    def candidates(self, count: int) -> list[int]:
        """Numbers of the chunks to evict next."""
        keys = self.policy.get_evict_candidates(self.mapping, count, bool)
        return [int.from_bytes(key, "big") for key in keys]


class PolicyContract:
    """Tests that every policy must pass, whatever its order is."""

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        """Override it: a function that makes a new policy."""
        raise NotImplementedError

    @pytest.fixture
    def run(self, make_policy: MakePolicy) -> PolicyRun:
        """A new policy with its mapping."""
        return PolicyRun(make_policy())

    def test_it_starts_empty(self, run: PolicyRun) -> None:
        """There is nothing to evict."""
        assert len(run.mapping) == 0
        assert run.candidates(5) == []

    def test_it_has_a_name_in_lower_case(self, run: PolicyRun) -> None:
        """The name in the settings."""
        assert run.policy.name
        assert run.policy.name == run.policy.name.lower()

    def test_no_more_than_asked_for(self, run: PolicyRun) -> None:
        """Up to ``num_candidates``, best first: fewer are the start of more."""
        run.put(*range(10))
        run.hit(3, 4, 3)
        everything = run.candidates(10)
        assert sorted(everything) == list(range(10))
        for count in range(11):
            assert run.candidates(count) == everything[:count]
        assert run.candidates(99) == everything

    def test_what_cannot_go_is_no_candidate(self, run: PolicyRun) -> None:
        """Pinned chunks are skipped, the order of the others stays."""
        run.put(0, 1, 2)
        run.put(3, 4, idle=False)
        run.put(5)
        assert sorted(run.candidates(9)) == [0, 1, 2, 5]
        run.mapping[make_key(0)] = False
        assert sorted(run.candidates(9)) == [1, 2, 5]

    def test_what_stands_in_the_way_is_named(self, run: PolicyRun) -> None:
        """Pinned chunks that stand before the last candidate; no others."""
        run.put(*range(12))
        order = run.candidates(12)
        for number in (order[0], order[2], order[7]):
            run.mapping[make_key(number)] = False
        passed: list[ChunkKey] = []
        keys = run.policy.get_evict_candidates(run.mapping, 2, bool, passed)
        assert keys == [make_key(order[1]), make_key(order[3])]
        assert passed == [make_key(order[0]), make_key(order[2])]

    @pytest.mark.parametrize("num_pinned", [10, 400])
    def test_pinned_chunks_are_not_passed_again_and_again(
        self, run: PolicyRun, num_pinned: int
    ) -> None:
        """Once set aside they cost nothing, however many there are."""
        run.put(*range(800))
        for number in run.candidates(num_pinned):
            run.mapping[make_key(number)] = False
        looked_at = 0

        def is_idle(value: bool) -> bool:
            nonlocal looked_at
            looked_at += 1
            return value

        for _ in range(200):
            passed: list[ChunkKey] = []
            keys = run.policy.get_evict_candidates(run.mapping, 1, is_idle, passed)
            run.policy.set_aside(passed, run.mapping)
            run.evict(*[int.from_bytes(key, "big") for key in keys])
        assert len(run.mapping) == 600
        assert looked_at <= num_pinned + 2 * 200

    @pytest.mark.parametrize("used", [True, False])
    def test_what_was_set_aside_is_not_lost(self, run: PolicyRun, used: bool) -> None:
        """It can go again when its pin ends, also if nobody notes the use."""
        run.put(*range(20))
        aside = run.candidates(8)
        for number in aside:
            run.mapping[make_key(number)] = False
        for _ in range(2):
            run.policy.set_aside([make_key(number) for number in aside], run.mapping)
            assert sorted(run.candidates(99)) == sorted(set(range(20)) - set(aside))
        run.evict(aside[0])
        for number in aside[1:]:
            run.mapping[make_key(number)] = True
            if used:
                run.hit(number)
        assert sorted(run.candidates(99)) == sorted(set(range(20)) - {aside[0]})
        run.evict(*run.candidates(99))
        assert len(run.mapping) == 0

    def test_asking_changes_nothing(self, run: PolicyRun) -> None:
        """Without side effects, on the mapping and on later answers."""
        run.put(*range(8))
        run.hit(1, 2)
        before = list(run.mapping.items())
        first = [run.candidates(count) for count in (8, 1, 3)]
        assert [run.candidates(count) for count in (8, 1, 3)] == first
        assert list(run.mapping.items()) == before

    def test_a_prompt_goes_from_its_end(self, run: PolicyRun) -> None:
        """However its parts came in, once their order was noted; what is missing is skipped."""
        order = [make_key(number) for number in (0, 1, 2, 3, 77)]
        for part in ((1, 0), (2,), (3,)):
            run.put(*part)
            run.policy.note_order(order, run.mapping)
        assert run.candidates(4) == [3, 2, 1, 0]
        run.hit(3, 2, 1, 0)
        run.policy.note_order(order, run.mapping)
        assert run.candidates(4) == [3, 2, 1, 0]
        assert len(run.mapping) == 4

    def test_what_went_is_forgotten(self, run: PolicyRun) -> None:
        """It is no candidate any more, and can come again as if it were new."""
        run.put(0, 1, 2)
        run.hit(0, 0, 0)
        run.evict(0)
        assert sorted(run.candidates(9)) == [1, 2]
        run.put(0)
        assert sorted(run.candidates(9)) == [0, 1, 2]
        run.evict(0, 1, 2)
        assert run.candidates(9) == []

    def test_a_random_history_loses_nothing(self, run: PolicyRun) -> None:
        """The candidates are always exactly what is there."""
        chance = random.Random(7)
        present: list[int] = []
        for step in range(3000):
            action = chance.randrange(4)
            if action == 0 or not present:
                run.put(step)
                present.append(step)
            elif action == 1:
                run.evict(present.pop(chance.randrange(len(present))))
            elif action == 2:
                chosen = run.candidates(1)
                run.evict(*chosen)
                _drop(present, chosen)
            else:
                run.hit(chance.choice(present))
            if step % 100 == 0:
                assert sorted(run.candidates(len(present) + 1)) == sorted(present)

    def test_many_hits_are_as_good_as_one_by_one(self, make_policy: MakePolicy) -> None:
        """Also where a chunk is hit twice, or was set aside."""
        chance = random.Random(11)
        one_by_one, at_once = PolicyRun(make_policy()), PolicyRun(make_policy())
        for step in range(0, 900, 3):
            prompt = [make_key(number) for number in range(step, step + 3)]
            present = one_by_one.candidates(999)
            used = chance.choices(present, k=min(len(present), 5))
            aside = [make_key(number) for number in present[:2]]
            one_by_one.hit(*used)
            at_once.policy.update_on_hits([make_key(number) for number in used], at_once.mapping)
            for run in (one_by_one, at_once):
                run.policy.note_chain(prompt)
                run.put(step + 2, step + 1, step)
                run.policy.set_aside(aside, run.mapping)
                run.evict(*run.candidates(2 if step > 300 else 0))
            assert one_by_one.candidates(999) == at_once.candidates(999)
        assert len(at_once.mapping) > 400


def _drop(present: list[int], gone: Sequence[int]) -> None:
    for number in gone:
        present.remove(number)
