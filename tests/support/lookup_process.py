"""A worker in a process of its own: a real engine with a slow tier, and its lookup server.

For tests that stop it, kill its clients and send it anything: :class:`LookupWorker` starts it and
asks it what it holds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from kvkeep.lookup.server import LookupServer
from kvkeep.storage.prefetch import PrefetchOptions
from kvkeep.testing.faulty import SlowBackend
from support.engine_rig import EngineRig

#: What is stored: six chunks of 8 tokens, in memory; and six others, in the slow tier alone.
IN_MEMORY = list(range(100, 148))
BELOW = list(range(500, 548))
SLOW = "SlowBackend"
#: A lookup that waits for the slow tier is answered by then.
PREFETCH_S = 3.0
_ANSWER_S = 30.0


class _Worker:
    """What runs in the process."""

    def __init__(self, path: Path, lease_timeout_s: float) -> None:
        self.rig = EngineRig(
            pool_chunks=64,
            lease_timeout_s=lease_timeout_s,
            tiers=[SlowBackend],
            prefetching=PrefetchOptions(timeout_s=PREFETCH_S),
        ).__enter__()
        self.rig.fill(BELOW)
        self.rig.fill(IN_MEMORY)
        keys = self.rig.engine.token_database.process_tokens(BELOW).keys
        self.rig.storage.batched_remove(keys, [self.rig.cpu.name])
        identity = self.rig.engine.token_database.identity
        self.server = LookupServer(
            self.rig.engine, path, identity=identity, metrics=self.rig.metrics
        )

    def set_gate(self, is_open: bool) -> None:
        """Let reads of the slow tier through, or hold them."""
        slow = self.rig.storage.storage_backends[SLOW]
        assert isinstance(slow, SlowBackend)
        (slow.gate.set if is_open else slow.gate.clear)()

    def leases(self) -> int:
        """Open leases."""
        return self.rig.engine.check().open_leases

    def metrics(self) -> dict[str, float]:
        """Every counter."""
        return dict(self.rig.metrics.snapshot())

    def rss_bytes(self) -> int:
        """Memory of the process."""
        return int(psutil.Process().memory_info().rss)

    def check_idle(self) -> None:
        """Nothing is held."""
        self.rig.check_idle()


def _serve(path: Path, lease_timeout_s: float, pipe: Connection) -> None:
    worker = _Worker(path, lease_timeout_s)
    pipe.send(None)
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            verb, args = pipe.recv()
            try:
                pipe.send(getattr(worker, verb)(*args))
            except Exception as error:  # noqa: BLE001  the top of this task: the test is told
                pipe.send(error)
    worker.server.close()
    worker.rig.engine.close()


@dataclass
class LookupWorker:
    """The process, from outside.

    Attributes:
        path: of its lookup socket.
    """

    path: Path
    process: ForkServerProcess
    pipe: Connection

    def ask(self, verb: str, *args: object) -> Any:
        """Ask the worker something; an error that it raised is raised here."""
        self.pipe.send((verb, args))
        return self.answer()

    def answer(self) -> Any:
        """What the worker answers."""
        if not self.pipe.poll(_ANSWER_S):
            raise AssertionError(f"the worker did not answer within {_ANSWER_S} s")
        result = self.pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self) -> None:
        """SIGSTOP."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def running_worker(path: Path, *, lease_timeout_s: float = 300.0) -> Iterator[LookupWorker]:
    """A worker that answers at ``path``; at the end it holds nothing, and ends in order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(path, lease_timeout_s, theirs), daemon=True)
    process.start()
    theirs.close()
    worker = LookupWorker(path, process, ours)
    try:
        worker.answer()
        yield worker
        worker.ask("check_idle")
    finally:
        worker.go_on()
        ours.close()
        process.join(_ANSWER_S)
        if process.is_alive():
            process.kill()
            process.join()
    assert not path.exists(), "the worker left its socket"
