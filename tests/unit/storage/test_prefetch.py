"""Prefetches: what is answered is in memory and held; everything else is given back at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kvkeep.hashing import ChunkKey
from kvkeep.metrics import Metrics
from kvkeep.prefix import LocatedRun
from kvkeep.storage.leases import EventStatus, EventType
from kvkeep.storage.manager import StorageManager
from kvkeep.storage.prefetch import Prefetched, Prefetcher, PrefetchOptions
from kvkeep.testing.chunks import check_found, fill, make_keys, make_pool, put, wait_until
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend, SlowBackend
from support.storage import check_quiet

WAIT_S = 20.0
LOADING = EventType.LOADING
CPU, SLOW = "LocalCPUBackend", "SlowBackend"


@dataclass
class Rig:
    """A manager over a pool and a slow tier."""

    manager: StorageManager
    pool: object
    slow: SlowBackend
    keys: list[ChunkKey]

    def start(self, lookup_id: str, keys: Sequence[ChunkKey] | None = None, **more):
        keys = self.keys if keys is None else keys
        lengths = [4 * count for count in range(len(keys) + 1)]
        return self.manager.async_lookup_and_prefetch(lookup_id, keys, lengths, **more)

    def ask(self, lookup_id: str, keys: Sequence[ChunkKey] | None = None, **more) -> Prefetched:
        return self.start(lookup_id, keys, **more).result(WAIT_S)

    def claim(self, lookup_id: str, count: int) -> None:
        """Use what a lookup holds, as a load does, and let it go."""
        lease = self.manager.claim_lease(lookup_id)
        assert lease is not None
        found = check_found(self.keys[:count], [lease.get(key) for key in self.keys[:count]])
        assert found == [True] * count
        assert len(lease) == count
        lease.release()

    def outcome(self, name: str) -> float:
        return self.manager.metrics.snapshot().get(
            f'kvkeep_prefetches_total{{outcome="{name}"}}', 0.0
        )

    def wait_idle(self) -> None:
        """Nothing is under way, nothing is held."""
        prefetcher = self.manager.prefetcher
        wait_until(lambda: prefetcher.num_lookups == 0 and prefetcher.num_chunks_held == 0)
        wait_until(lambda: self.pool.memcheck().num_objects == len(self.pool))
        assert len(prefetcher.events) == 0
        check_quiet(self.manager, self.pool)


@contextmanager
def open_rig(
    *, capacity: int = 12, num_chunks: int = 6, faults: Sequence[Fault] = (), **options
) -> Iterator[Rig]:
    """``num_chunks`` chunks that only the slow tier has; at the end all is given back."""
    metrics = Metrics()
    pool = make_pool(capacity, metrics)
    slow = SlowBackend(pool)
    tier = FaultyBackend(slow, faults) if faults else slow
    manager = StorageManager(
        [pool, tier],
        allocator_backend=pool,
        metrics=metrics,
        prefetching=PrefetchOptions(
            **({"window_chunks": 2, "windows_ahead": 2, "max_chunks": 10} | options)
        ),
    )
    keys = make_keys(num_chunks)
    for key in keys:
        put(slow, pool, [key])
    rig = Rig(manager, pool, slow, keys)
    try:
        yield rig
        slow.gate.set()
        rig.wait_idle()
    finally:
        manager.close()
        manager.close()


def test_what_is_answered_for_is_in_memory_verified_and_held():
    with open_rig() as rig:
        answer = rig.ask("r")
        assert answer == Prefetched(24, (LocatedRun(SLOW, 0, 6),))
        assert rig.pool.batched_contains(rig.keys) == 6
        events = rig.manager.prefetcher.events
        assert events.get_event_status(LOADING, "r") is EventStatus.DONE
        assert rig.manager.prefetcher.num_chunks_held == 6
        rig.claim("r", 6)
        assert events.get_event_status(LOADING, "r") is EventStatus.NOT_FOUND


def test_it_is_asked_for_a_few_chunks_ahead():
    with open_rig() as rig:
        rig.ask("r")
        assert rig.slow.reads == [rig.keys[0:2], rig.keys[2:4], rig.keys[4:6]]
        rig.manager.batched_unpin("r")


def test_everything_in_memory_is_answered_at_once():
    with open_rig() as rig:
        rig.ask("r")
        rig.slow.gate.clear()
        future = rig.start("again")
        assert future.done()
        assert future.result().runs == (LocatedRun(CPU, 0, 6),)
        assert rig.manager.prefetcher.events.get_event(LOADING, "again") is None
        rig.claim("again", 6)
        rig.claim("r", 6)
        assert rig.outcome("done") == 1


def test_nothing_anywhere_and_no_chunks():
    with open_rig() as rig:
        assert rig.ask("r", make_keys(3, first=100)) == Prefetched(0, ())
        assert rig.ask("s", []) == Prefetched(0, ())
        assert rig.slow.reads == []


def test_a_prefix_in_several_tiers():
    """Spec 4.6: memory, slow, memory again, and a gap that ends it."""
    with open_rig(num_chunks=8) as rig:
        rig.ask("r")
        rig.manager.batched_unpin("r")
        rig.wait_idle()
        rig.pool.batched_remove([rig.keys[2], rig.keys[3], rig.keys[6]])
        rig.slow.batched_remove([rig.keys[0], rig.keys[4], rig.keys[6]])
        answer = rig.ask("s")
        assert answer.runs == (
            LocatedRun(CPU, 0, 2),
            LocatedRun(SLOW, 2, 4),
            LocatedRun(CPU, 4, 6),
        )
        assert answer.num_tokens == 24
        rig.claim("s", 6)


def test_without_pin_it_only_comes_into_memory():
    with open_rig() as rig:
        assert rig.ask("r", pin=False).num_tokens == 24
        assert rig.pool.batched_contains(rig.keys) == 6
        assert len(rig.manager.leases) == 0


def test_only_tiers_that_are_named_are_asked():
    with open_rig() as rig:
        assert rig.ask("r", search_range=[CPU]).num_tokens == 0
        assert rig.slow.reads == []
        with pytest.raises(ValueError, match="no tier"):
            rig.start("r", search_range=["tape"])
        rig.manager.set_frozen(True)
        assert rig.ask("r").num_tokens == 0


def test_a_deadline_answers_with_what_has_arrived():
    """Two windows come in, the third never does."""
    with open_rig(timeout_s=2.0) as rig:
        slow_get = rig.slow.batched_get_blocking

        def get(keys):
            if rig.keys[4] in keys:
                rig.slow.gate.clear()
            return slow_get(keys)

        rig.slow.batched_get_blocking = get
        assert rig.ask("r") == Prefetched(16, (LocatedRun(SLOW, 0, 4),))
        assert rig.outcome("deadline") == 1
        rig.claim("r", 4)
        rig.slow.gate.set()


def test_fault_20_a_lookup_that_is_given_up_holds_nothing():
    """Fault 20: given up while its chunks travel, and what arrives later goes back at once."""
    with open_rig() as rig:
        rig.slow.gate.clear()
        future = rig.start("r")
        wait_until(lambda: len(rig.slow.reads) == 2)
        assert rig.manager.batched_unpin("r")
        assert future.result(WAIT_S) == Prefetched(0, ())
        wait_until(lambda: rig.manager.prefetcher.num_lookups == 0)
        assert not rig.manager.batched_unpin("r")
        rig.slow.gate.set()
        rig.wait_idle()
        assert len(rig.pool) == 0, "nobody wanted it any more"
        assert len(rig.slow.reads) == 2, "it went on fetching"
        assert rig.outcome("stopped") == 1


def test_fault_20_given_up_between_the_lease_and_the_answer(monkeypatch):
    """Fault 20: the unpin comes when the lease is in the table and the answer is not out."""
    with open_rig() as rig:
        keep = rig.manager.leases.keep

        def keep_and_unpin(lookup_id, lease):
            keep(lookup_id, lease)
            rig.manager.batched_unpin(lookup_id)

        monkeypatch.setattr(rig.manager.leases, "keep", keep_and_unpin)
        assert rig.ask("r") == Prefetched(0, ())


def test_fault_21_a_second_lookup_of_one_id_ends_the_first():
    """Fault 21: the first one's pins are given back, not forgotten, and not the second one's."""
    with open_rig() as rig:
        rig.slow.gate.clear()
        first = rig.start("r")
        wait_until(lambda: len(rig.slow.reads) == 2)
        second = rig.start("r", rig.keys[:3])
        assert first.result(WAIT_S).num_tokens == 0
        rig.slow.gate.set()
        assert second.result(WAIT_S).num_tokens == 12
        third = rig.ask("r", rig.keys[:1])
        assert third.num_tokens == 4
        rig.claim("r", 1)


def test_fault_21_a_second_lookup_is_answered_when_the_first_has_just_arrived(monkeypatch):
    """Fault 21: the first one, whose end comes late, does not take the second one's lease."""
    with open_rig() as rig:
        settle = Prefetcher._settle

        def settle_late(self, job, travel, outcome):
            monkeypatch.undo()
            assert rig.start("r", rig.keys[:1]).result(0).num_tokens == 4
            settle(self, job, travel, outcome)

        monkeypatch.setattr(Prefetcher, "_settle", settle_late)
        assert rig.ask("r") == Prefetched(0, ())
        rig.claim("r", 1)


def test_fault_24_nobody_claims_what_was_found():
    """Fault 24: whoever asked is gone; the lease's deadline ends the event and frees the room."""
    with open_rig() as rig:
        rig.manager.leases.timeout_s = 0.05
        assert rig.ask("r").num_tokens == 24
        wait_until(lambda: rig.manager.leases.reap() == 1)
        assert rig.manager.claim_lease("r") is None


def test_fault_26_two_prefetches_never_hold_half_of_the_room_each():
    """Fault 26: room is taken whole; the second one waits for it and holds nothing."""
    with open_rig(num_chunks=12, capacity=16, max_chunks=6) as rig:
        rig.slow.gate.clear()
        first = rig.start("a", rig.keys[:5])
        wait_until(lambda: len(rig.slow.reads) == 2)
        second = rig.start("b", rig.keys[6:11])
        wait_until(lambda: rig.manager.prefetcher.num_lookups == 2)
        rig.slow.gate.set()
        assert first.result(WAIT_S).num_tokens == 20
        assert not second.done()
        assert rig.manager.prefetcher.num_chunks_held == 5
        rig.claim("a", 5)
        assert second.result(WAIT_S).num_tokens == 20
        rig.manager.batched_unpin("b")


def test_fault_26_more_than_the_room_is_shortened():
    """Fault 26: what can never fit is shortened, never waited for."""
    with open_rig(max_chunks=4) as rig:
        assert rig.ask("r").num_tokens == 16
        rig.claim("r", 4)


def test_fault_26_a_full_pool_shortens_a_prefetch():
    """Fault 26: chunks that somebody holds are not waited for."""
    with open_rig(capacity=6, num_chunks=5) as rig:
        held = fill(rig.pool, make_keys(4, first=50))
        rig.pool._alloc_timeout_s = 0.1
        assert rig.ask("r").num_tokens <= 8
        rig.manager.batched_unpin("r")
        for obj in held:
            obj.ref_count_down()


def test_two_lookups_of_one_prompt_fetch_it_once():
    with open_rig(max_chunks=20) as rig:
        rig.slow.gate.clear()
        both = [rig.start(name) for name in "ab"]
        wait_until(lambda: rig.manager.prefetcher.num_chunks_held == 12)
        rig.slow.gate.set()
        assert [future.result(WAIT_S).num_tokens for future in both] == [24, 24]
        fetched = [key for read in rig.slow.reads for key in read]
        assert sorted(fetched) == sorted(rig.keys)
        rig.claim("a", 6)
        rig.claim("b", 6)


def test_a_lookup_that_waited_for_one_that_was_given_up_fetches_itself():
    with open_rig(max_chunks=20) as rig:
        rig.slow.gate.clear()
        first = rig.start("a")
        wait_until(lambda: len(rig.slow.reads) == 2)
        second = rig.start("b")
        wait_until(lambda: rig.manager.prefetcher.num_chunks_held == 12)
        rig.manager.batched_unpin("a")
        assert first.result(WAIT_S).num_tokens == 0
        rig.slow.gate.set()
        assert second.result(WAIT_S).num_tokens == 24
        rig.claim("b", 6)


def test_fault_27_the_io_thread_waits_for_nothing():
    """Fault 27: a call that blocks runs elsewhere, and waiting in the I/O thread is refused."""
    with open_rig(faults=[Fault("contains", FaultKind.DELAY, delay_s=0.3)]) as rig:
        slow = rig.start("r")
        seen: list[str] = []
        refused = threading.Event()

        def inside() -> None:
            try:
                rig.manager.claim_lease("r")
            except RuntimeError as error:
                seen.append(str(error))
            refused.set()

        assert rig.manager.prefetcher._runtime.call_soon(inside)
        assert refused.wait(WAIT_S)
        assert not slow.done(), "the I/O thread answered while the tier was still asked"
        assert "I/O thread" in seen[0]
        assert slow.result(WAIT_S).num_tokens == 24
        rig.claim("r", 6)


def test_a_claim_waits_for_a_lookup_that_is_under_way():
    with open_rig() as rig:
        rig.slow.gate.clear()
        rig.start("r")
        wait_until(lambda: len(rig.slow.reads) == 2)
        threading.Timer(0.05, rig.slow.gate.set).start()
        rig.claim("r", 6)


@pytest.mark.parametrize(
    ("fault", "tokens"),
    [
        (Fault("contains", FaultKind.RAISE), 0),
        (Fault("contains", FaultKind.LONG), 0),
        (Fault("contains", FaultKind.DROP), 24),
        (Fault("get", FaultKind.RAISE), 0),
        (Fault("get", FaultKind.RAISE_AFTER), 0),
        (Fault("get", FaultKind.RAISE, first=1), 8),
        (Fault("get", FaultKind.SHORT), 0),
        (Fault("get", FaultKind.LONG, first=2), 16),
        (Fault("get", FaultKind.DROP, first=1), 8),
    ],
    ids=str,
)
def test_whatever_a_tier_does_there_is_one_answer(fault, tokens):
    """Two chunks at once: what came before the fault is answered for, and the rest is let go."""
    with open_rig(faults=[fault], windows_ahead=1) as rig:
        assert rig.ask("r").num_tokens == tokens
        if tokens:
            rig.claim("r", tokens // 4)


def test_an_exception_of_our_own_is_an_answer(monkeypatch):
    with open_rig() as rig:

        def broken(*args):
            raise ZeroDivisionError

        monkeypatch.setattr(rig.manager.prefetcher._roads.transfer, "write_back", broken)
        assert rig.ask("r") == Prefetched(0, ())
        assert rig.outcome("failed") == 1
        monkeypatch.undo()
        assert rig.ask("r").num_tokens == 24
        rig.claim("r", 6)


def test_too_many_lookups_find_what_is_in_memory():
    with open_rig(max_lookups=1) as rig:
        rig.slow.gate.clear()
        first = rig.start("a")
        wait_until(lambda: len(rig.slow.reads) == 2)
        assert rig.start("b").result(0).num_tokens == 0
        assert rig.outcome("refused") == 1
        rig.slow.gate.set()
        assert first.result(WAIT_S).num_tokens == 24
        rig.claim("a", 6)


def test_closing_answers_everything():
    with open_rig() as rig:
        rig.slow.gate.clear()
        futures = [rig.start(f"r{number}") for number in range(5)]
        rig.manager.close()
        assert [future.result(WAIT_S).num_tokens for future in futures] == [0] * 5
        assert len(rig.manager.prefetcher.events) == 0


def test_what_travels_when_everything_is_removed_does_not_come_back():
    with open_rig() as rig:
        rig.slow.gate.clear()
        future = rig.start("r")
        wait_until(lambda: len(rig.slow.reads) == 2)
        content = dict(rig.slow._chunks)
        rig.manager.clear()
        rig.slow._chunks.update(content)  # the tier answers with what it had, late
        rig.slow.gate.set()
        assert future.result(WAIT_S).num_tokens == 0
        assert len(rig.pool) == 0


def test_a_lease_can_be_shortened():
    with open_rig() as rig:
        rig.ask("r")
        rig.manager.keep_first("r", 2)
        rig.claim("r", 2)
        rig.manager.keep_first("unknown", 1)


def test_given_up_at_random_moments_200_times():
    """Issue 4, point 4: no lease, no event, no task, no room, no memory is left."""
    chance = random.Random(7)
    with open_rig(capacity=20, num_chunks=8, max_chunks=16) as rig:
        rig.slow.seconds_per_chunk = 0.0005
        answers = []
        for number in range(200):
            length = chance.randint(1, 8)
            future = rig.start(f"r{number}", rig.keys[:length])
            threading.Event().wait(chance.choice([0, 0.0002, 0.001, 0.003, 0.006]))
            rig.manager.batched_unpin(f"r{number}")
            answers.append(future.result(WAIT_S).num_tokens == 4 * length)
            if chance.random() < 0.3:
                rig.pool.batched_remove(rig.keys)
        assert any(answers)
        assert not all(answers)


def test_four_threads_start_claim_and_give_up_the_same_lookups():
    """Whoever ends a lookup, and in whatever order: each is answered once, and nothing is left."""
    with open_rig(capacity=24, num_chunks=8, max_chunks=16) as rig:
        rig.slow.seconds_per_chunk = 0.0005
        names = [f"r{number}" for number in range(6)]
        unanswered: list[str] = []

        def live(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(60):
                name = chance.choice(names)
                future = rig.start(name, rig.keys[: chance.randint(1, 8)])
                threading.Event().wait(chance.choice([0, 0.0005, 0.002]))
                if chance.random() < 0.4:
                    lease = rig.manager.claim_lease(chance.choice(names))
                    if lease is not None:
                        lease.release()
                else:
                    rig.manager.batched_unpin(name)
                if chance.random() < 0.2:
                    rig.pool.batched_remove(rig.keys)
                rig.manager.batched_unpin(name)
                try:
                    future.result(WAIT_S)
                except TimeoutError:
                    unanswered.append(name)

        threads = [threading.Thread(target=live, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert unanswered == []
        for name in names:
            rig.manager.batched_unpin(name)
