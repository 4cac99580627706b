"""Cores: threads that kvkeep starts may use every core that the engine gave the worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvkeep.connectors.vllm.worker import Cores

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}

needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="there is one core")


@contextmanager
def bound_to(core: int) -> Iterator[None]:
    """This thread may use one core only, as vLLM binds its worker's."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def affinity_of_new_thread() -> set[int]:
    """Cores of a thread that is started now."""
    found: set[int] = set()
    thread = threading.Thread(target=lambda: found.update(os.sched_getaffinity(0)))
    thread.start()
    thread.join(10)
    return found


@contextmanager
def another_thread_on(core: int) -> Iterator[None]:
    """As vLLM's other threads are: alive, and bound to a core of their own."""
    bound, end = threading.Event(), threading.Event()

    def run() -> None:
        os.sched_setaffinity(0, {core})
        bound.set()
        end.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    assert bound.wait(10)
    try:
        yield
    finally:
        end.set()
        thread.join(10)


@needs_two_cores
def test_threads_started_within_use_the_cores_of_all_threads() -> None:
    first, second = sorted(CORES)[:2]
    with bound_to(first), another_thread_on(second):
        assert affinity_of_new_thread() == {first}
        cores = Cores()
        with cores.all_of_them():
            assert affinity_of_new_thread() >= {first, second}
        assert os.sched_getaffinity(0) == {first}


@needs_two_cores
def test_the_own_core_is_restored_after_an_exception() -> None:
    first, second = sorted(CORES)[:2]
    with bound_to(first), another_thread_on(second):
        cores = Cores()
        with pytest.raises(KeyError), cores.all_of_them():
            raise KeyError
        assert os.sched_getaffinity(0) == {first}


def test_a_thread_that_is_not_bound_is_left_alone() -> None:
    before = os.sched_getaffinity(0)
    cores = Cores()
    with cores.all_of_them():
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before
