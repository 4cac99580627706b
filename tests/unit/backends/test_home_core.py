"""Threads of a pool begin their loads on different cores, where there are few."""

from __future__ import annotations

import os
import threading

import pytest

from kvkeep.backends.io.home_core import go_home
from kvkeep.backends.io.pool import IOPool, StoreJob

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="threads have no cores of their own here"
)
ALL = frozenset({0, 1, 2})


@pytest.fixture
def moves(monkeypatch) -> list[tuple[str, frozenset[int]]]:
    """On a machine of three cores: which threads were told to use which ones."""
    asked: list[tuple[str, frozenset[int]]] = []

    def move(_: int, cores: set[int]) -> None:
        asked.append((threading.current_thread().name, frozenset(cores)))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL))
    monkeypatch.setattr(os, "sched_setaffinity", move)
    return asked


def test_a_thread_goes_to_its_core_and_is_not_held_there(moves):
    for index in range(4):
        go_home(index, 4)
    assert [cores for _, cores in moves] == [{0}, ALL, {1}, ALL, {2}, ALL, {0}, ALL]


def test_the_system_chooses_where_there_are_cores_enough(moves):
    go_home(0, 2)
    assert moves == []


def test_a_refusal_is_no_failure(moves, monkeypatch):
    def refuse(_: int, cores: set[int]) -> None:
        raise OSError(22, "the cores were taken away")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    go_home(0, 4)


def test_a_thread_may_use_the_same_cores_afterwards():
    before = os.sched_getaffinity(0)
    go_home(1, 64)
    assert os.sched_getaffinity(0) == before


def test_loads_begin_apart_and_stores_where_they_are(moves):
    pool = IOPool(name="test", threads=3, max_queued_bytes=10, on_error=pytest.fail)
    together = threading.Barrier(3)
    loads = [pool.load(lambda: together.wait(10)) for _ in range(3)]
    assert sorted(load.result(10) for load in loads) == [0, 1, 2]
    homes = {(name, cores) for name, cores in moves if cores != ALL}
    assert homes == {(f"kvkeep-test-{index}", frozenset({index})) for index in range(3)}
    moves.clear()
    stored = threading.Event()
    assert pool.store(StoreJob(stored.set, pytest.fail, 1))
    assert stored.wait(10)
    assert pool.wait_idle(10)
    assert moves == []
    pool.close(10)
