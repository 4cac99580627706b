"""Fault 38: several processes share one directory and one budget.

Each stores twice the budget while the directory is sampled; each reads what the other wrote; one is
killed and the other goes on.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
import time

import pytest

from kvkeep.backends.base import PutOutcome
from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.testing.chunks import make_key
from support.disk import chunk_files, file_bytes
from support.disk_processes import BUDGET_BYTES, ROOM, churn, rig, store_own

WAIT_S = 60.0
COUNT = 2 * ROOM


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.disk_processes"])
    return context


@pytest.fixture
def start(processes, tmp_path):
    """Start a process that stores its own chunks; returns its pipe and itself."""
    started = []

    def start_one(name):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=store_own, args=(tmp_path, name, COUNT, theirs))
        process.start()
        theirs.close()
        started.append((ours, process))
        assert answer(ours) == "ready"
        return ours, process

    yield start_one
    for pipe, process in started:
        process.kill()
        process.join(WAIT_S)
        pipe.close()


def answer(pipe):
    assert pipe.poll(WAIT_S), "a process did not answer"
    return pipe.recv()


class Sampler:
    """Samples the bytes in a directory until it is stopped.

    It holds the directory's lock while it adds up, since it cannot look at all files at once: a
    chunk would count twice that is renamed, or removed for another one, while it goes through them.
    """

    def __init__(self, path):
        self.largest = self.samples = 0
        self._path, self._stop = path, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.wait(0.002):
            with (self._path / ROOT_NAME / "ledger").open("rb") as ledger:
                fcntl.flock(ledger, fcntl.LOCK_EX)
                self.largest = max(self.largest, file_bytes(self._path))
            self.samples += 1

    def stop(self):
        self._stop.set()
        self._thread.join(WAIT_S)


def names_there(path, name):
    """Names of the chunks of one process that are there now."""
    stems = {file.stem for file in chunk_files(path)}
    return [(name, n) for n in range(COUNT) if make_key((name, n)).hex() in stems]


def test_two_processes_store_twice_the_budget_each(start, tmp_path, capsys):
    """Fault 38: never over the budget; each reads what the other wrote; one is killed."""
    (one, _), (two, process) = start("one"), start("two")
    sampler = Sampler(tmp_path)
    try:
        for pipe in (one, two):
            pipe.send("go")
        assert answer(one) == answer(two) == COUNT
    finally:
        sampler.stop()
    assert sampler.largest <= BUDGET_BYTES
    assert file_bytes(tmp_path) > BUDGET_BYTES // 2
    crossed = 0
    for pipe, other in ((one, "two"), (two, "one")):
        there = names_there(tmp_path, other)
        pipe.send(there)
        assert answer(pipe) == (len(there), 0)
        crossed += len(there)
    assert crossed > ROOM // 2
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)
    there = names_there(tmp_path, "two")
    one.send(there)
    assert answer(one) == (len(there), 0)
    one.send(None)
    with rig(tmp_path) as it:
        on_disk = chunk_files(tmp_path)
        indexed = it.disk.keys()
        assert {key.hex() for key in indexed} == {path.stem for path in on_disk}
        assert it.read(indexed) == (len(on_disk), 0)
    with capsys.disabled():
        print(
            f"\ndisk sharing: {sampler.samples} samples, at most {sampler.largest} of "
            f"{BUDGET_BYTES} bytes, {crossed} chunks read across processes, 0 wrong"
        )


def test_a_process_killed_while_writing_and_another_that_goes_on(processes, tmp_path):
    """Faults 24, 38: what a dead one had reserved comes back; the budget holds."""
    with rig(tmp_path) as it:
        for seed in range(4):
            ours, theirs = processes.Pipe()
            process = processes.Process(target=churn, args=(tmp_path, seed, theirs))
            process.start()
            theirs.close()
            assert answer(ours) is True
            sampler = Sampler(tmp_path)
            deadline = time.monotonic() + 0.2
            number = 0
            while time.monotonic() < deadline:
                key = make_key(("mine", seed, number))
                assert it.put([key]) == [PutOutcome.STORED]
                assert it.disk.flush(WAIT_S)
                number += 1
            os.kill(process.pid, signal.SIGKILL)
            process.join(WAIT_S)
            ours.close()
            for number in range(2 * ROOM):
                it.put([make_key(("after", seed, number))])
                assert it.disk.flush(WAIT_S)
            sampler.stop()
            assert sampler.largest <= BUDGET_BYTES
            assert list((tmp_path / ROOT_NAME / "tmp").iterdir()) == []
            assert it.disk.used_bytes() == file_bytes(tmp_path)
            last = make_key(("after", seed, 2 * ROOM - 1))
            assert it.read([last]) == (1, 0)


def test_what_an_earlier_process_left_counts(tmp_path):
    """Fault 37: files of an earlier run are found, counted and evicted in their turn."""
    with rig(tmp_path) as it:
        for number in range(ROOM):
            it.put([make_key(("old", number))])
            it.disk.flush(WAIT_S)
        assert len(it.disk.keys()) == ROOM
    with rig(tmp_path) as it:
        assert len(it.disk.keys()) == ROOM
        for number in range(ROOM // 2):
            it.put([make_key(("new", number))])
            it.disk.flush(WAIT_S)
            assert file_bytes(tmp_path) <= BUDGET_BYTES
        assert it.read([make_key(("new", n)) for n in range(ROOM // 2)]) == (ROOM // 2, 0)
        assert it.read([make_key(("old", n)) for n in range(ROOM // 2)]) == (0, 0)
        assert it.read([make_key(("old", n)) for n in range(ROOM // 2, ROOM)]) == (ROOM // 2, 0)


def test_two_tiers_in_one_process(tmp_path):
    """Fault 38: eight ranks each used the whole budget once: open backends count, not processes."""
    with rig(tmp_path) as one, rig(tmp_path) as two:
        for number in range(ROOM):
            for it, name in ((one, "a"), (two, "b")):
                it.put([make_key((name, number))])
                assert it.disk.flush(WAIT_S)
        assert file_bytes(tmp_path) <= BUDGET_BYTES
        assert one.disk.used_bytes() == two.disk.used_bytes() == file_bytes(tmp_path)
        assert one.read([make_key(("b", ROOM - 1))]) == (1, 0)
        assert one.disk.remove(make_key(("b", ROOM - 1)))
        assert two.read([make_key(("b", ROOM - 1))]) == (0, 0)
