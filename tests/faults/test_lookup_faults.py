"""Faults of the lookup service, over real sockets and a real engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from kvkeep.errors import LookupServiceError
from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.protocol import MAX_MESSAGE_BYTES, Check, encode
from kvkeep.lookup.server import LookupServer
from support.engine_rig import EngineRig

TOKENS = list(range(100, 148))  # six chunks


class Slow:
    """The rig's engine, whose lookups wait at a gate and fail on command."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.lookup_unpin, self.check, self.clear = (
            engine.lookup_unpin,
            engine.check,
            engine.clear,
        )

    def lookup(self, tokens, **more):
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return self.engine.lookup(tokens, **more)


@dataclass
class Service:
    """An engine that has TOKENS, its server, and a client."""

    rig: EngineRig
    slow: Slow
    server: LookupServer
    path: Path
    client: LookupClient

    def connect(self, timeout_s: float = 30) -> LookupClient:
        """One more client."""
        return LookupClient([self.path], timeout_s=timeout_s)


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., Service]]:
    """``serve(timeout_s=, lease_timeout_s=)``; at the end nothing is held."""
    made: list[Service] = []

    def make(*, timeout_s: float = 30, lease_timeout_s: float = 300.0) -> Service:
        rig = EngineRig(lease_timeout_s=lease_timeout_s).__enter__()
        rig.fill(TOKENS)
        slow = Slow(rig.engine)
        path = tmp_path / f"{len(made)}" / "0.sock"
        identity = rig.engine.token_database.identity
        server = LookupServer(slow, path, identity=identity, metrics=rig.metrics)
        made.append(Service(rig, slow, server, path, LookupClient([path], timeout_s=timeout_s)))
        return made[-1]

    yield make
    for service in made:
        service.slow.gate.set()
        service.client.close()
        service.server.close()
        service.rig.check_idle()
        service.rig.__exit__(None, None, None)


def wait_for(condition: Callable[[], bool]) -> None:
    """Until ``condition()``, for at most ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def leases(service: Service) -> int:
    return service.rig.engine.check().open_leases


def test_a_late_answers_pins_end(serve):
    """Fault 20: the scheduler has given the lookup up; its pins end all the same."""
    service = serve(timeout_s=0.2)
    service.slow.gate.clear()
    assert service.client.lookup("r#0", TOKENS) == 0
    assert service.client.failures == {"timeout": 1}
    seen: list[int] = []
    keep = service.rig.storage.leases.keep

    def watched(lookup_id, lease):
        keep(lookup_id, lease)
        seen.append(len(lease))

    service.rig.storage.leases.keep = watched
    service.slow.gate.set()
    wait_for(lambda: bool(seen) and leases(service) == 0)
    assert seen == [6], "the late lookup did pin"


def test_a_server_that_hangs_costs_one_deadline(serve):
    """Fault 28: from then on every request waited for the timeout."""
    service = serve(timeout_s=0.5)
    service.slow.gate.clear()
    for number in range(200):
        assert service.client.lookup(f"r#{number}", TOKENS) == 0
    assert service.client.failures == {"timeout": 1, "down": 199}, "only the first one waited"
    service.slow.gate.set()
    wait_for(lambda: service.client.lookup("again", TOKENS) == 48)
    service.client.unpin(["again"])
    wait_for(lambda: leases(service) == 0)


@pytest.mark.parametrize("error", [ValueError("bad"), MemoryError(), RecursionError()], ids=repr)
def test_an_exception_is_an_answer(serve, error):
    """Fault 28: one exception killed the lookup server's thread."""
    service = serve()
    service.slow.error = error
    assert service.client.lookup("r#0", TOKENS) == 0
    assert service.client.failures == {"error": 1}
    service.slow.error = None
    assert service.client.lookup("r#1", TOKENS, pin=False) == 48
    failures = service.rig.metrics.snapshot()
    cause = type(error).__name__
    assert (
        failures[f'kvkeep_failures_total{{tier="lookup",operation="lookup",cause="{cause}"}}'] == 1
    )


@contextmanager
def raw_socket(path: Path, kind: int = zmq.DEALER) -> Iterator[zmq.Socket]:
    """A socket of somebody else."""
    context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(f"ipc://{path}")
    yield socket
    socket.close()
    context.term()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"nonsense"],
        [b"", encode(Check(1))],
        [b"a", b"b", b"c"],
        [b"\x91" * 5000],
        [encode(Check(1))[:-1]],
    ],
    ids=range(6),
)
def test_malformed_messages_are_answered_or_dropped(serve, frames):
    """Fault 28: one bad request never kills the server."""
    service = serve()
    with raw_socket(service.path) as socket:
        socket.send_multipart(frames)
    assert service.client.lookup("r#0", TOKENS, pin=False) == 48
    wait_for(lambda: any('cause="malformed"' in name for name in service.rig.metrics.snapshot()))


def test_an_oversize_message_is_refused_by_the_socket(serve):
    """Fault 28: a message that is too long is not even read."""
    service = serve()
    with raw_socket(service.path) as socket:
        socket.send(bytes(MAX_MESSAGE_BYTES + 1))
        assert service.client.lookup("r#0", TOKENS, pin=False) == 48
        socket.setsockopt(zmq.LINGER, 0)


def test_a_client_that_reads_no_answers_blocks_nobody(serve):
    """Fault 28: answers that nobody fetches are dropped."""
    service = serve()
    with raw_socket(service.path) as socket:
        socket.setsockopt(zmq.RCVHWM, 1)
        for number in range(5000):
            socket.send(encode(Check(number)))
            if number % 1000 == 0:
                assert service.client.lookup("r#0", TOKENS, pin=False) == 48
        socket.setsockopt(zmq.LINGER, 0)
    assert service.client.lookup("r#0", TOKENS, pin=False) == 48


def test_a_server_that_is_gone_is_a_miss(serve):
    """Fault 28: no server, no hit, no exception; strict questions say so."""
    service = serve(timeout_s=0.2)
    service.server.close()
    assert service.client.lookup("r#0", TOKENS) == 0
    with pytest.raises(LookupServiceError, match="no answer in time"):
        service.client.check()


def test_a_restarted_server_is_found_again(serve):
    """Fault 28: the client connects anew without being told."""
    service = serve(timeout_s=0.3)
    service.server.close()
    assert service.client.lookup("r#0", TOKENS) == 0
    service.server = LookupServer(
        service.slow,
        service.path,
        identity=service.rig.engine.token_database.identity,
        metrics=service.rig.metrics,
    )
    wait_for(lambda: service.client.lookup("r#1", TOKENS, pin=False) == 48)


ASK_AND_STOP = """
import os, sys, time
from pathlib import Path
from kvkeep.lookup.client import LookupClient
client = LookupClient([Path(sys.argv[1])], timeout_s=30)
print(client.lookup("dead#0", list(range(100, 148))), flush=True)
time.sleep(60)
"""


def test_a_killed_scheduler_leaves_leases_that_expire(serve):
    """Fault 24: the process that holds a lease dies with kill -9."""
    service = serve(lease_timeout_s=1.5)
    with subprocess.Popen(
        [sys.executable, "-c", ASK_AND_STOP, str(service.path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            assert process.stdout.readline().strip() == "48"
            assert leases(service) == 1
        finally:
            process.send_signal(signal.SIGKILL)
    wait_for(lambda: service.client.lookup("next", TOKENS[:7]) == 0 and leases(service) == 0)
    assert service.rig.metrics.snapshot()["kvkeep_leases_expired_total"] == 1


def test_a_lookup_is_answered_while_its_asker_waits_in_the_same_process(serve):
    """Fault 27: the wait is on one thread, the work on another."""
    service = serve()
    assert service.client.lookup("r#0", TOKENS, pin=False) == 48


def test_many_waiting_requests_cost_no_sleep(serve, monkeypatch):
    """Fault 30: the scheduler slept 10 ms per request under a lock."""
    service = serve()

    def no_sleep(seconds):
        raise AssertionError(f"slept {seconds} s")

    monkeypatch.setattr(time, "sleep", no_sleep)
    for number in range(300):
        assert service.client.lookup(f"r#{number}", TOKENS, pin=False) == 48
