"""A lookup server in a worker's own process, and all that can be done to it from outside."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvkeep.errors import LookupServiceError
from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.protocol import (
    MAX_MESSAGE_BYTES,
    Check,
    ErrorReply,
    Hello,
    Keep,
    Lookup,
    LookupReply,
    Start,
    Unpin,
    WireScope,
    decode_reply,
    encode,
)
from kvkeep.testing.chunks import wait_until
from kvkeep.tokens import as_token_bytes
from support.lookup_process import BELOW, IN_MEMORY, LookupWorker, running_worker

#: What a server may need beyond what it had: buffers of the sockets and of the interpreter.
MEMORY_MARGIN = 48 << 20
STALL_S = float(os.environ.get("KVKEEP_STALL_SECONDS", "1"))
SCOPE = WireScope()


@pytest.fixture
def worker(tmp_path) -> Iterator[LookupWorker]:
    with running_worker(tmp_path / "sockets" / "0.sock") as running:
        yield running


@contextmanager
def client_of(worker: LookupWorker, timeout_s: float = 20.0) -> Iterator[LookupClient]:
    client = LookupClient([worker.path], timeout_s=timeout_s, prefetch_timeout_s=20.0)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def raw_socket(path: Path) -> Iterator[zmq.Socket]:
    """Somebody who does not keep to the protocol."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(f"ipc://{path}")
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def ends_expired(client: LookupClient, worker: LookupWorker) -> bool:
    """Leases past their deadline go when the table is used: by any lookup that pins."""
    client.lookup("none", [1, 2, 3])
    return worker.ask("leases") == 0


def found_by(client: LookupClient, lookup_id: str) -> int | None:
    """What a lookup that was started has found; None: not yet."""
    outcome = client.poll(lookup_id)
    return None if outcome is None else int(outcome.found)


def answers(client: LookupClient, tokens: list[int] = IN_MEMORY) -> bool:
    return client.lookup("probe", tokens, pin=False) == len(tokens)


def malformed_messages(seed: int) -> Iterator[list[bytes]]:
    """Random bytes, cut and changed messages, wrong frames, lies about lengths."""
    pick = random.Random(seed)
    good = [
        encode(Lookup(1, "a", as_token_bytes(IN_MEMORY), SCOPE, True)),
        encode(Start(2, "b", as_token_bytes(IN_MEMORY), SCOPE)),
        encode(Unpin(3, ("a",))),
        encode(Keep(4, "a", 3)),
        encode(Hello(5, 99)),
    ]
    lies = [
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x96\xa6lookup\x01\xdb\xff\xff\xff\xff",
        b"\x96\xa6lookup\x01\xa1a\xc6\x03\xff\xff\xff",
        b"\x91" * 20_000,
        encode(Lookup(1, "odd", b"123", SCOPE, True)),
    ]
    for _ in range(400):
        data = bytearray(pick.choice(good))
        kind = pick.randrange(5)
        if kind == 0:
            yield [pick.randbytes(pick.randrange(2000))]
        elif kind == 1:
            yield [bytes(data[: pick.randrange(len(data))])]
        elif kind == 2:
            for _ in range(pick.randrange(1, 4)):
                data[pick.randrange(min(len(data), 24))] = pick.randrange(256)
            yield [bytes(data)]
        elif kind == 3:
            yield [pick.randbytes(5)] * pick.randrange(2, 6)
        else:
            yield [pick.choice(lies)]


@pytest.mark.parametrize("form", ["lookup", "start"])
def test_fault_28_malformed_messages_leave_the_server_as_it_was(tmp_path, form) -> None:
    """Fault 28: thousands of messages that are none, while others ask."""
    path = tmp_path / "sockets" / "0.sock"
    with (
        running_worker(path, lease_timeout_s=3.0) as worker,
        client_of(worker) as client,
        raw_socket(path) as socket,
    ):
        assert answers(client)
        before = worker.ask("rss_bytes")
        for seed in range(5):
            for frames in malformed_messages(seed):
                socket.send_multipart(frames)
            if form == "lookup":
                assert answers(client)
            else:
                client.start("s", IN_MEMORY)
                wait_until(lambda: found_by(client, "s") == len(IN_MEMORY))
                client.unpin(["s"])
        while socket.poll(200):
            decode_reply(socket.recv())  # whatever it answers is a message
        failed = 'kvkeep_failures_total{tier="lookup",operation="lookup",cause="malformed"}'
        assert worker.ask("metrics")[failed] > 1000
        assert worker.ask("rss_bytes") < before + MEMORY_MARGIN
        wait_until(lambda: ends_expired(client, worker))  # some were questions after all


def test_fault_28_oversize_messages_are_not_read(worker) -> None:
    """Fault 28: a message beyond the limit costs its sender the connection, others nothing."""
    with client_of(worker) as client:
        assert answers(client)
        before = worker.ask("rss_bytes")
        for _ in range(3):
            with raw_socket(worker.path) as socket:
                socket.send(bytes(MAX_MESSAGE_BYTES + 1))
                assert answers(client)
        assert worker.ask("rss_bytes") < before + MEMORY_MARGIN


def test_a_message_of_the_largest_size_is_an_answer(worker) -> None:
    """16 million token ids less a few: a miss, or what is there, and the memory comes back."""
    with client_of(worker, timeout_s=60) as client:
        many = as_token_bytes(IN_MEMORY) + bytes(MAX_MESSAGE_BYTES - 4096)
        assert client.lookup("large", many, pin=False) == len(IN_MEMORY)
        assert answers(client)


@pytest.mark.parametrize("form", [Lookup, Start], ids=["lookup", "start"])
def test_fault_28_a_thousand_lookups_in_flight(worker, form) -> None:
    """Fault 28: sent before the first answer is read; all are answered, none is held up."""
    data = as_token_bytes(IN_MEMORY)
    more = (True,) if form is Lookup else ()
    with client_of(worker) as client, raw_socket(worker.path) as socket:
        for number in range(1000):
            socket.send(encode(form(number, f"r{number}", data, SCOPE, *more)))
        found: dict[int, int] = {}
        while len(found) < 1000:
            assert socket.poll(20_000), f"{len(found)} answers"
            reply = decode_reply(socket.recv())
            assert isinstance(reply, LookupReply)
            found[reply.seq] = reply.found
        assert set(found.values()) == {len(IN_MEMORY)}
        assert worker.ask("leases") == 1000
        client.unpin([f"r{number}" for number in range(1000)])
        wait_until(lambda: worker.ask("leases") == 0)


def test_a_thousand_lookups_that_wait_for_a_slow_tier(worker) -> None:
    """Fault 20: started, not yet answered; half are given up, the others come, nothing stays."""
    with client_of(worker) as client:
        worker.ask("set_gate", False)
        for number in range(1000):
            client.start(f"r{number}", BELOW)
        assert all(client.poll(f"r{number}") is None for number in range(1000))
        assert answers(client), "those in memory are answered meanwhile"
        given_up = [f"r{number}" for number in range(0, 1000, 2)]
        client.unpin(given_up)
        worker.ask("set_gate", True)
        waiting = {f"r{number}" for number in range(1, 1000, 2)}
        found: dict[str, int] = {}

        def all_answered() -> bool:
            for lookup_id in list(waiting - found.keys()):
                answer = found_by(client, lookup_id)
                if answer is not None:
                    found[lookup_id] = answer
            return found.keys() == waiting

        wait_until(all_answered, timeout_s=60)
        assert set(found.values()) <= {0, len(BELOW)}, "whole, or beyond what may travel at once"
        assert len(BELOW) in found.values()
        client.unpin(list(waiting))
        wait_until(lambda: worker.ask("leases") == 0)
        assert client.num_started == 0


def test_many_threads_with_one_client(worker) -> None:
    """Calls wait for each other, and each gets its own answer."""
    with client_of(worker) as client:
        wrong: list[object] = []

        def ask(number: int) -> None:
            for turn in range(25):
                length = 8 * ((number + turn) % 7)
                found = client.lookup(f"{number}-{turn}", IN_MEMORY[:length])
                if found != length:
                    wrong.append((number, turn, found))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        client.unpin([f"{number}-{turn}" for number in range(40) for turn in range(25)])
        wait_until(lambda: worker.ask("leases") == 0)


ASK_AND_WAIT = """
import sys, time
from pathlib import Path
from kvkeep.lookup.client import LookupClient
from support.lookup_process import BELOW, IN_MEMORY
client = LookupClient([Path(sys.argv[1])], timeout_s=30, prefetch_timeout_s=30)
for number in range(200):
    client.lookup(f"dead{number}", IN_MEMORY)
    client.start(f"late{number}", BELOW)
print("asked", flush=True)
time.sleep(60)
"""


def test_fault_24_a_client_that_dies_leaves_leases_that_expire(tmp_path) -> None:
    """Fault 24: killed with hundreds of leases, and of lookups that were not answered yet."""
    path = tmp_path / "sockets" / "0.sock"
    with running_worker(path, lease_timeout_s=3.0) as worker:
        worker.ask("set_gate", False)
        with subprocess.Popen(
            [sys.executable, "-c", ASK_AND_WAIT, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        ) as process:
            try:
                assert process.stdout.readline().strip() == "asked"
                assert worker.ask("leases") > 0
            finally:
                process.send_signal(signal.SIGKILL)
        worker.ask("set_gate", True)
        with client_of(worker) as client:
            wait_until(lambda: ends_expired(client, worker), timeout_s=30)
            assert answers(client)


@pytest.mark.parametrize("form", ["lookup", "start"])
def test_fault_20_a_stopped_worker_costs_one_deadline(worker, form) -> None:
    """Faults 20, 28: all are misses meanwhile; when it goes on, late answers leave nothing."""
    with client_of(worker, timeout_s=0.5) as client:
        assert answers(client)
        worker.stop()
        try:
            started = time.monotonic()
            for number in range(2000):
                if form == "lookup":
                    assert client.lookup(f"r{number}", IN_MEMORY) == 0
                    continue
                client.start(f"r{number}", IN_MEMORY)
            if form == "lookup":
                assert client.failures["timeout"] == 1
                assert client.failures["down"] == 1999
            assert time.monotonic() - started < 30
            with pytest.raises(LookupServiceError):
                client.check()
            time.sleep(max(0.0, STALL_S - (time.monotonic() - started)))
        finally:
            worker.go_on()
        if form == "start":
            wait_until(lambda: [client.poll(f"r{n}") for n in range(2000)].count(None) == 0)
            client.unpin([f"r{number}" for number in range(2000)])
        wait_until(lambda: answers(client))
        wait_until(lambda: worker.ask("leases") == 0)


def test_fault_28_a_client_that_reads_nothing_costs_a_bounded_queue(worker) -> None:
    """Fault 28: 20,000 questions, no answer fetched: the server drops answers and serves others."""
    with client_of(worker) as client, raw_socket(worker.path) as socket:
        socket.setsockopt(zmq.RCVHWM, 1)
        assert answers(client)
        before = worker.ask("rss_bytes")
        question = encode(Check(1))
        for number in range(20_000):
            socket.send(question)
            if number % 5000 == 0:
                assert answers(client)
        assert answers(client)
        assert worker.ask("rss_bytes") < before + MEMORY_MARGIN


def test_an_error_is_an_answer_with_a_bounded_text(worker) -> None:
    """A question that fails is answered, and says why, at a length that travels."""
    with raw_socket(worker.path) as socket:
        socket.send(encode(Hello(7, 1 << 62)))
        assert socket.poll(10_000)
        reply = decode_reply(socket.recv())
        assert isinstance(reply, ErrorReply)
        assert reply.seq == 7
        assert "protocol" in reply.message
