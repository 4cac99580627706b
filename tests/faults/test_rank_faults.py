"""Ranks that stop, die or raise in the middle of a load: nobody waits beyond the deadline, and all
ranks say the same."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from kvkeep.testing.chunks import wait_until
from support.rank_processes import Loaded, Point, Ranks, running_ranks

TOKENS = list(range(100, 148))  # six chunks
#: ``KVKEEP_STALL_SECONDS`` gives stops of that length.
STALL_S = float(os.environ.get("KVKEEP_STALL_SECONDS", "1.5"))
#: At so many moments ranks are stopped or killed; the rest of them is left out.
NUM_POINTS = int(os.environ.get("KVKEEP_STRESS_KILLS", "100"))
#: How long ranks are stopped at random.
STRESS_S = float(os.environ.get("KVKEEP_STRESS_SECONDS", "10"))
TIMEOUT_S = 0.6
#: Two timeouts, and what a busy machine adds.
DEADLINE_S = 2 * TIMEOUT_S + 10

#: Moments of a load of rank 0, and of another rank, when rank 0's chunks are everybody's.
FIRST_SHARED = [
    ("send Plan", False),
    ("send Plan", True),
    ("copy", False),
    ("copy", True),
    ("decide", False),
    ("decide", True),
    ("send Verdict", False),
    ("send Verdict", True),
]
FIRST_OWN = [point for point in FIRST_SHARED if point[0] != "send Plan"] + FIRST_SHARED[:2]
OTHER = [("copy", False), ("copy", True), ("send Done", False), ("send Done", True)]


def some(points: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Evenly spread, as many as are wanted; all by default."""
    step = max(1, -(-2 * len(points) // NUM_POINTS))
    return points[step // 2 :: step]


def load_with(ranks: Ranks, req_id: str, who: int, point: Point) -> dict[int, Loaded]:
    """Load on all ranks while ``who`` acts at ``point``; what the others say, in time."""
    started = time.monotonic()
    for rank in range(ranks.num_ranks):
        ranks.ask(rank, "load", TOKENS, req_id, point if rank == who else None, False)
    others = [rank for rank in range(ranks.num_ranks) if rank != who]
    answers = {rank: ranks.answer(rank, DEADLINE_S) for rank in others}
    assert time.monotonic() - started < DEADLINE_S
    return answers


def check_agreed(answers: dict[int, Loaded]) -> None:
    """All say the same, and what they say is there is there."""
    assert len({loaded.mask for loaded in answers.values()}) == 1, answers
    assert all(loaded.is_right for loaded in answers.values())
    assert sum(next(iter(answers.values())).mask) in (0, len(TOKENS))


def check_works(ranks: Ranks, req_id: str) -> None:
    """The group heals by itself, and loads again."""
    ranks.wait_whole()
    ranks.all("fill", TOKENS)  # who was killed has lost its own

    def loads() -> bool:
        answers = dict(enumerate(ranks.load(TOKENS, req_id)))
        check_agreed(answers)
        return sum(answers[0].mask) == len(TOKENS)

    wait_until(loads)  # on a busy machine a deadline may pass
    ranks.check_idle()


def stop_everywhere(ranks: Ranks, points: list[tuple[str, bool]], who: int) -> None:
    for name, is_after in points:
        label = f"{who} {name} {is_after}"
        if who == 0 or not ranks.is_shared:
            assert ranks.call(0, "lookup", TOKENS, label) == len(TOKENS)
        answers = load_with(ranks, label, who, Point(name, is_after, "stop"))
        ranks.wait_stopped(who)
        ranks.send_signal(who, signal.SIGCONT)
        answers[who] = ranks.answer(who, DEADLINE_S)
        check_agreed(answers)
        check_works(ranks, f"after {label}")


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "own"])
def test_fault_36_a_stopped_rank_holds_nobody_up(tmp_path, is_shared) -> None:
    """Fault 36: stopped at every moment of a load; all agree, also the one that wakes up later."""
    with running_ranks(tmp_path, num_ranks=3, is_shared=is_shared, timeout_s=TIMEOUT_S) as ranks:
        ranks.all("fill", TOKENS)
        first = FIRST_SHARED if is_shared else FIRST_OWN
        for who, points in ((0, first), (1, OTHER)):
            stop_everywhere(ranks, some(points), who)


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "own"])
def test_fault_36_and_24_a_killed_rank_holds_nobody_up(tmp_path, is_shared) -> None:
    """Faults 24, 36: ``kill -9`` at every moment of a load, with a lease held."""
    with running_ranks(tmp_path, num_ranks=3, is_shared=is_shared, timeout_s=5.0) as ranks:
        ranks.all("fill", TOKENS)
        first = FIRST_SHARED if is_shared else FIRST_OWN
        for who, points in ((0, first), (1, OTHER)):
            for name, is_after in some(points):
                label = f"{who} {name} {is_after}"
                ranks.call(0, "lookup", TOKENS, label)
                answers = load_with(ranks, label, who, Point(name, is_after, "kill"))
                check_agreed(answers)
                ranks.processes[who].join(DEADLINE_S)
                ranks.start(who)
                check_works(ranks, f"after {label}")


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "own"])
def test_fault_36_a_rank_that_raises_is_a_miss_on_all(tmp_path, is_shared) -> None:
    """Fault 36: one rank raised inside a collective; the others waited in it."""
    with running_ranks(tmp_path, num_ranks=3, is_shared=is_shared, timeout_s=5.0) as ranks:
        ranks.all("fill", TOKENS)
        for who in (0, 1):
            point = Point("copy", False, "raise")
            answers = load_with(ranks, f"raised {who}", who, point)
            answers[who] = ranks.answer(who)
            check_agreed(answers)  # the engine tries chunk by chunk: all, or nothing
        for who, name in ((0, "decide"), (0, "send Verdict"), (0, "send Plan"), (1, "send Done")):
            answers = load_with(ranks, f"raised {who} {name}", who, Point(name, False, "raise"))
            with pytest.raises(RuntimeError, match="raised at"):
                ranks.answer(who)
            check_agreed(answers)
            check_works(ranks, f"after {who} {name}")


def test_fault_36_a_rank_that_does_not_come_is_waited_for_once(tmp_path) -> None:
    """Fault 36: a stopped rank costs one deadline, not one per load."""
    with running_ranks(tmp_path, timeout_s=TIMEOUT_S) as ranks:
        ranks.all("fill", TOKENS)
        assert ranks.call(0, "lookup", TOKENS) == len(TOKENS)
        ranks.send_signal(1, signal.SIGSTOP)
        ranks.wait_stopped(1)
        for number in range(20):
            assert not any(ranks.call(0, "load", TOKENS, f"r{number}", None, False).mask)
        metrics = ranks.call(0, "metrics")
        failed = 'kvkeep_failures_total{{tier="ranks",operation="load",cause="{}"}}'
        assert metrics[failed.format("timeout")] == 1
        assert metrics[failed.format("not_whole")] == 19
        assert ranks.call(0, "lookup", TOKENS, "r") == 0, "no promise that cannot be kept"
        ranks.send_signal(1, signal.SIGCONT)
        check_works(ranks, "after")


def test_fault_36_a_stop_of_rank_0_for_longer_than_every_deadline(tmp_path) -> None:
    """Fault 36: rank 0 is stopped while it decides; the others have decided when it wakes up."""
    with running_ranks(tmp_path, num_ranks=3, timeout_s=TIMEOUT_S) as ranks:
        ranks.all("fill", TOKENS)
        point = Point("decide", False, "stop")
        answers = load_with(ranks, "r", 0, point)
        assert not any(answers[1].mask)
        time.sleep(max(0.0, STALL_S - 2 * TIMEOUT_S))
        ranks.send_signal(0, signal.SIGCONT)
        answers[0] = ranks.answer(0)
        check_agreed(answers)
        check_works(ranks, "after")


def test_ranks_that_disagree_give_a_shorter_prefix(tmp_path) -> None:
    """Each rank has lost another chunk: the lookup is per rank, the load is the minimum."""
    with running_ranks(tmp_path, num_ranks=3, is_shared=False) as ranks:
        ranks.all("fill", TOKENS)
        ranks.call(1, "forget", TOKENS, 4)
        ranks.call(2, "forget", TOKENS, 2)
        assert ranks.all("lookup", TOKENS) == [48, 32, 16]
        loaded = ranks.load(TOKENS, "r")
        assert [sum(each.mask) for each in loaded] == [16, 16, 16]
        assert all(each.is_right for each in loaded)
        ranks.call(0, "forget", TOKENS, 0)
        assert [sum(each.mask) for each in ranks.load(TOKENS, "s")] == [0, 0, 0]


def test_a_rank_that_lost_what_was_promised(tmp_path) -> None:
    """Fault 36: one rank finds nothing at all, at once and on all."""
    with running_ranks(tmp_path, is_shared=False, timeout_s=30) as ranks:
        ranks.all("fill", TOKENS)
        ranks.call(1, "forget", TOKENS, 0)
        started = time.monotonic()
        assert [sum(each.mask) for each in ranks.load(TOKENS, "r")] == [0, 0]
        assert time.monotonic() - started < 15, "without waiting for the deadline"


def test_a_rank_that_comes_later_is_let_in(tmp_path) -> None:
    """Rank 0 alone promises nothing; it does once the other has come."""
    with running_ranks(tmp_path) as ranks:
        ranks.all("fill", TOKENS)
        ranks.send_signal(1, signal.SIGKILL)
        ranks.processes[1].join()
        assert not any(ranks.call(0, "load", TOKENS, "alone", None, False).mask)
        assert ranks.call(0, "lookup", TOKENS) == 0
        ranks.start(1)
        wait_until(lambda: ranks.call(0, "lookup", TOKENS) == len(TOKENS))
        check_works(ranks, "both")


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "own"])
def test_fault_36_stops_at_random_moments(tmp_path, is_shared) -> None:
    """Fault 36: a random rank, at a random moment, for shorter and longer than the deadlines."""
    pick = random.Random(36)
    end = time.monotonic() + STRESS_S
    with running_ranks(tmp_path, num_ranks=3, is_shared=is_shared, timeout_s=0.05) as ranks:
        ranks.all("fill", TOKENS)
        number = 0
        while time.monotonic() < end:
            number += 1
            for rank in range(3):
                ranks.ask(rank, "load", TOKENS, f"r{number}", None, False)
            who = pick.randrange(3)
            time.sleep(pick.random() * 0.012)
            ranks.send_signal(who, signal.SIGSTOP)
            time.sleep(pick.choice((0.0, 0.002, 0.04, 0.06, 0.11, 0.2)))
            ranks.send_signal(who, signal.SIGCONT)
            answers = {rank: ranks.answer(rank, DEADLINE_S) for rank in range(3)}
            check_agreed(answers)
            ranks.wait_whole()
        check_works(ranks, "after")
