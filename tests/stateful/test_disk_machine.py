"""The disk tier against a model: puts, reads, leases, damage, restarts, another process's view.

The rule: what is read is right, what the model says cannot be there is a miss, nothing is left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvkeep.backends.base import Lease
from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.memory.base import References
from kvkeep.testing.chunks import check_found, fill, make_keys, make_pool
from support.disk import FaultyIO, chunk_files, chunk_path, file_bytes, make_disk

KEYS = make_keys(14)
#: Room for 8 of the 14.
BUDGET_BYTES = 4096 * 9
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)
WAIT_S = 20.0


class DiskMachine(RuleBasedStateMachine):
    """Two open tiers over one directory."""

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.pool = make_pool()
        self.io = FaultyIO(piece=100)
        self.disks = [self._open(), self._open()]
        self.possible = set()  # keys that may be there: put and not removed since
        self.leases = []

    def _open(self):
        return make_disk(self.pool, self.path, io=self.io, size_bytes=BUDGET_BYTES)

    @rule(who=st.integers(0, 1), keys=SOME)
    def put(self, who, keys):
        with References(fill(self.pool, keys)) as held:
            self.disks[who].batched_submit_put_task(keys, held.objects)
        assert self.disks[who].flush(WAIT_S)
        self.possible |= set(keys)

    @rule(who=st.integers(0, 1), keys=SOME)
    def put_into_a_full_disk(self, who, keys):
        def full(operation):
            if operation == "write":
                raise OSError(28, "full")

        self.io.before = full
        try:
            with References(fill(self.pool, keys)) as held:
                self.disks[who].batched_submit_put_task(keys, held.objects)
            assert self.disks[who].flush(WAIT_S)
        finally:
            self.io.before = lambda operation: None

    @rule(who=st.integers(0, 1), keys=SOME)
    def read(self, who, keys):
        found = check_found(keys, self.disks[who].batched_get_blocking(keys))
        assert all(key in self.possible for key, there in zip(keys, found, strict=True) if there)

    @rule(who=st.integers(0, 1), keys=SOME)
    def look_up_and_pin(self, who, keys):
        lease = Lease("request", time.monotonic() + 60)
        found = self.disks[who].batched_contains(keys, pin=lease)
        held = check_found(keys, [lease.get(key) for key in keys])
        assert held == [index < found for index in range(len(keys))]
        assert self.possible.issuperset(keys[:found])
        self.leases.append((lease, keys[:found]))

    @rule()
    def end_a_lease(self):
        if self.leases:
            lease, keys = self.leases.pop(0)
            assert all(check_found(keys, [lease.get(key) for key in keys]))
            lease.release()

    @rule(who=st.integers(0, 1), keys=SOME)
    def remove(self, who, keys):
        self.disks[who].batched_remove(keys)
        self.possible -= set(keys)
        assert self.disks[who].batched_get_blocking(keys) == [None] * len(keys)

    @rule(key=st.sampled_from(KEYS), cut=st.integers(0, 447))
    def damage(self, key, cut):
        path = chunk_path(self.path, key)
        if path.exists():
            os.truncate(path, cut)
            self.possible.discard(key)

    @rule(who=st.integers(0, 1))
    def restart(self, who):
        self.disks[who].close()
        self.disks[who] = self._open()

    @rule()
    def take_the_ledger_away(self):
        (self.path / ROOT_NAME / "ledger").unlink(missing_ok=True)

    @rule(who=st.integers(0, 1))
    def clear(self, who):
        self.disks[who].clear()
        self.possible.clear()
        assert chunk_files(self.path) == []

    @invariant()
    def the_budget_holds(self):
        assert file_bytes(self.path) <= BUDGET_BYTES
        assert list((self.path / ROOT_NAME / "tmp").iterdir()) == []

    def teardown(self):
        for lease, _ in self.leases:
            lease.release()
        for disk in self.disks:
            disk.close()
        self.pool.clear()
        assert self.pool.memcheck().num_objects == 0
        self.pool.close()
        shutil.rmtree(self.path)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
