"""Faults 4, 39: a process that writes to the disk tier is killed at any moment.

The number of kills is KVKEEP_STRESS_KILLS, 300 by default.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time

import pytest

from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.testing.chunks import make_key
from support.disk import chunk_files, file_bytes
from support.disk_processes import BUDGET_BYTES, UNIVERSE, churn, rig

KILLS = int(os.environ.get("KVKEEP_STRESS_KILLS", "300"))
WAIT_S = 60.0


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.disk_processes"])
    return context


def kill_one(processes, path, chance):
    """Start a churning process and kill it at a random moment."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=churn, args=(path, chance.getrandbits(32), theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(WAIT_S), "the process never started to write"
        assert ours.recv() is True
        complaint = ours.poll(chance.uniform(0.0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        assert not complaint, ours.recv()
    finally:
        process.kill()
        process.join(WAIT_S)
        ours.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_while_writing(processes, tmp_path, capsys):
    """Faults 4, 39: nothing wrong, nothing partial, index equals directory, budget holds."""
    chance = random.Random(20240607)
    universe = [make_key(number) for number in range(UNIVERSE)]
    checked = wrong = leftovers = kills = 0
    started = time.monotonic()
    for _ in range(KILLS):
        kill_one(processes, tmp_path, chance)
        kills += 1
        leftovers += len(list((tmp_path / ROOT_NAME / "tmp").iterdir()))
        assert file_bytes(tmp_path) <= BUDGET_BYTES
        with rig(tmp_path) as it:
            assert list((tmp_path / ROOT_NAME / "tmp").iterdir()) == []
            on_disk = {path.stem for path in chunk_files(tmp_path)}
            indexed = it.disk.keys()
            assert {key.hex() for key in indexed} == on_disk
            used_bytes = it.disk.used_bytes()
            assert used_bytes == file_bytes(tmp_path) <= BUDGET_BYTES
            found, bad = it.read(universe)
            assert found == len(on_disk)
            checked += found
            wrong += bad
            failures = [name for name in it.metrics.snapshot() if "failures" in name]
            assert failures == [], "a kill never leaves a chunk that does not verify"
            assert it.pool.memcheck().num_objects == 0
    with capsys.disabled():
        print(
            f"\ndisk kills: {kills}, unfinished files found: {leftovers}, "
            f"chunks checked: {checked}, wrong bytes: {wrong}, {time.monotonic() - started:.0f} s"
        )
    assert wrong == 0
    assert checked > 5 * kills
