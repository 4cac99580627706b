"""Lookups that nobody waits for: "not yet", then the number, over real sockets."""

from __future__ import annotations

import time

import pytest

from kvkeep.engine.results import FoundTokens
from kvkeep.lookup.client import Outcome, PendingLookup
from kvkeep.lookup.protocol import Keep, LookupReply, Start, Started, WireScope
from kvkeep.testing.chunks import wait_until

PROMPT = list(range(16))
NOBODY_DOWN = lambda rank: False  # noqa: E731


def poll(client, lookup_id: str) -> FoundTokens | None:
    """Tokens found, or None: not yet."""
    outcome = client.poll(lookup_id)
    return None if outcome is None else outcome.found


def poll_until(client, lookup_id: str) -> FoundTokens:
    """The answer, once it is there."""
    answers: list[FoundTokens | None] = []

    def answered() -> bool:
        answers.append(poll(client, lookup_id))
        return answers[-1] is not None

    wait_until(answered)
    return answers[-1]


def under_way(service, lookup_id: str) -> bool:
    return all(lookup_id in target.under_way for target in service.targets)


def start_later(service, lookup_id: str = "r#0") -> None:
    """Start a lookup, and wait until every worker has put it aside."""
    for target in service.targets:
        target.later = True
    service.client.start(lookup_id, PROMPT)
    wait_until(lambda: under_way(service, lookup_id))


def test_not_yet_then_the_number(start):
    service = start(8)
    start_later(service)
    assert [poll(service.client, "r#0") for _ in range(3)] == [None] * 3
    assert service.client.num_started == 1
    service.targets[0].settle("r#0")
    found = poll_until(service.client, "r#0")
    assert (found, found.tiers) == (8, (("tier", 8),))
    assert service.client.num_started == 0
    assert poll(service.client, "r#0") == 0, "it is told once"
    assert service.targets[0].leases == {"r#0"}


def test_an_answer_that_is_there_at_once(start):
    service = start(8)
    service.client.start("r#0", PROMPT)
    service.client.wait(10)
    assert poll(service.client, "r#0") == 8


def test_waiting_ends_with_the_first_word(start):
    service = start(8)
    service.client.wait(10)  # nothing is under way
    start_later(service)
    service.client.wait(10)  # "not yet" is a word
    started = time.monotonic()
    service.client.wait(0.05)
    assert time.monotonic() - started >= 0.04
    service.targets[0].settle("r#0")
    service.client.wait(10)
    assert poll(service.client, "r#0") == 8


def test_the_minimum_over_ranks_and_what_is_beyond_is_given_back(start):
    """Spec 10.2: ranks that disagree give the shorter prefix, and keep no more than it."""
    service = start(12, 8, 16)
    start_later(service)
    for target in service.targets[:2]:
        target.settle("r#0")
    assert poll(service.client, "r#0") is None
    service.targets[2].settle("r#0")
    assert poll_until(service.client, "r#0") == 8
    service.client.check()  # answered after what was sent before
    assert [target.kept for target in service.targets] == [[("r#0", 8)], [], [("r#0", 8)]]


def test_the_same_for_lookups_that_are_waited_for(start):
    service = start(12, 8)
    assert service.client.lookup("r#0", PROMPT) == 8
    service.client.check()
    assert [target.kept for target in service.targets] == [[("r#0", 8)], []]


def test_a_rank_without_a_hit_ends_the_other_ranks_leases(start):
    service = start(12, 0)
    start_later(service)
    for target in service.targets:
        target.settle("r#0")
    assert poll_until(service.client, "r#0") == 0
    service.client.check()
    assert all(not target.leases for target in service.targets)


def test_given_up_at_any_time(start):
    """Spec 10.2: while it is under way, after it was settled, and after it was told."""
    service = start(8)
    target = service.targets[0]
    for settle, told in [(False, False), (True, False), (True, True)]:
        start_later(service)
        if settle:
            target.settle("r#0")
        if told:
            assert poll_until(service.client, "r#0") == 8
        service.client.unpin(["r#0"])
        service.client.check()
        assert target.leases == set()
        assert target.under_way == {}
        assert poll(service.client, "r#0") == 0
    assert service.client.num_started == 0


def test_fault_20_a_late_answers_pins_end(start):
    """Fault 20: after its deadline a lookup is a miss, and what it found is given back."""
    service = start(8, timeout_s=1.5, prefetch_timeout_s=0.1)
    start_later(service)
    assert poll_until(service.client, "r#0") == 0
    assert service.client.failures == {"timeout": 1}
    wait_until(lambda: not service.targets[0].under_way)
    assert service.targets[0].leases == set()
    service.targets[0].later = False
    assert service.client.lookup("r#1", PROMPT) == 8, "a worker that says not yet is not down"


def test_a_dead_worker_costs_one_deadline(start):
    """Spec 10.2: also where nobody waits for it."""
    service = start(8, timeout_s=0.3)
    service.servers[0].close()
    service.client.start("r#0", PROMPT)
    service.client.start("r#1", PROMPT)
    assert poll(service.client, "r#0") is None
    assert poll_until(service.client, "r#0") == 0
    assert poll(service.client, "r#1") == 0, "their deadline is the same"
    for number in range(2, 100):
        service.client.start(f"r#{number}", PROMPT)
        assert poll(service.client, f"r#{number}") == 0
    assert service.client.failures == {"timeout": 2, "down": 98}


def test_a_worker_that_dies_while_chunks_travel(start):
    """What was under way is a miss as soon as anything else finds the worker dead."""
    service = start(8, timeout_s=0.3, prefetch_timeout_s=60)
    start_later(service)
    service.client.wait(10)
    assert poll(service.client, "r#0") is None
    service.servers[0].close()
    assert service.client.lookup("r#1", PROMPT) == 0
    assert poll(service.client, "r#0") == 0


def test_an_exception_is_an_answer(start):
    service = start(8, 8)
    service.targets[1].error = ValueError("bad")
    service.client.start("r#0", PROMPT)
    assert poll_until(service.client, "r#0") == 0
    service.client.unpin([])
    assert service.client.failures == {"error": 1}


def test_it_is_counted_by_whoever_relies_on_it(start):
    service = start(8)
    start_later(service)
    service.targets[0].settle("r#0")
    service.client.check()  # answered after what was settled before
    outcome = service.client.poll("r#0")
    assert service.metrics[0].snapshot()["kvkeep_lookup_tokens_total"] == 0
    service.client.count(16, outcome)
    service.client.count(16, Outcome(FoundTokens(), "timeout"))
    service.client.check()
    counted = service.metrics[0].snapshot()
    assert counted["kvkeep_lookup_tokens_total"] == 16 + 16
    assert counted['kvkeep_lookup_hit_tokens_total{tier="tier"}'] == 8
    assert counted['kvkeep_lookup_failed_tokens_total{cause="timeout"}'] == 16


def test_a_thousand_under_way(start):
    service = start(16)
    target = service.targets[0]
    target.later = True
    names = [f"r#{number}" for number in range(1000)]
    for name in names:
        service.client.start(name, PROMPT)
    wait_until(lambda: len(target.under_way) == 1000)
    assert service.client.lookup("now", PROMPT) == 16, "the server goes on"
    for name in names[::2]:
        service.client.unpin([name])
    wait_until(lambda: len(target.under_way) == 500)
    for name in names[1::2]:
        target.settle(name)
    assert all(poll_until(service.client, name) == 16 for name in names[1::2])
    assert service.client.num_started == 0
    assert service.client.failures == {}


def test_a_closed_client_misses(start):
    service = start(8)
    start_later(service)
    service.client.close()
    assert poll(service.client, "r#0") == 0
    service.client.start("r#1", PROMPT)
    assert poll(service.client, "r#1") == 0
    service.client.wait(1)


def test_a_server_that_is_closed_drops_what_comes_later(start):
    service = start(8)
    start_later(service)
    service.servers[0].close()
    service.targets[0].settle("r#0")


def pending(**more) -> PendingLookup:
    values = {
        "lookup_id": "r",
        "seq": 1,
        "num_ranks": 2,
        "word_deadline": 1.0,
        "deadline": 5.0,
    }
    return PendingLookup(**(values | more))


def test_outcomes_by_time():
    """Pure bookkeeping: who has said what by when."""
    lookup = pending()
    assert lookup.outcome(0.0, NOBODY_DOWN) is None
    assert lookup.outcome(1.0, NOBODY_DOWN).silent == (0, 1)
    lookup.note(0, Started(1))
    assert lookup.outcome(1.0, NOBODY_DOWN).silent == (1,)
    lookup.note(1, LookupReply(1, 8))
    assert lookup.outcome(4.9, NOBODY_DOWN) is None
    late = lookup.outcome(5.0, NOBODY_DOWN)
    assert (late.found, late.cause, late.silent) == (0, "timeout", ())
    assert lookup.outcome(1.0, lambda rank: rank == 0).cause == "down"
    assert lookup.outcome(1.0, lambda rank: rank == 1) is None
    lookup.note(0, LookupReply(1, 12))
    assert lookup.outcome(9.0, NOBODY_DOWN).found == 8
    assert pending(refused="full").outcome(0.0, NOBODY_DOWN).cause == "full"


@pytest.mark.parametrize("message", [Start(1, "r", b"\0" * 5, WireScope())])
def test_tokens_that_are_none_are_refused(start, message):
    service = start(8)
    client = service.client
    client.start("r#0", message.tokens)
    assert poll_until(client, "r#0") == 0
    assert client.failures == {"error": 1}


def test_keep_of_an_unknown_lookup_is_ignored(start):
    service = start(8)
    service.client._workers.send_all(Keep(1, "unknown", 4))
    assert service.client.check()[0].open_leases == 0
