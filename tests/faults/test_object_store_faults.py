"""What happens to requests while an S3-compatible server dies, freezes, fills up or is far away.

Every request ends by its deadline with the right bytes; the memory tier goes on; the breaker opens
and closes; nothing stays held. What Redis is asked too is in ``test_remote_faults.py``.
"""

from __future__ import annotations

import os
import shutil
import threading
import time

import pytest

from support.remote_requests import L1, L3, TOKENS, count
from support.servers.proxy import Weather, tcp_proxy
from support.servers.s3 import s3_server

#: For how long servers are frozen; KVKEEP_STALL_SECONDS=20 is the full measure.
STALL_S = float(os.environ.get("KVKEEP_STALL_SECONDS", "1.5"))


@pytest.fixture
def server():
    with s3_server() as server:
        yield server


def test_a_killed_server_leaves_the_memory_tier_alone(server, requests_over):
    """Faults 33, 35: L1 goes on; the breaker opens; after a restart what was stored is found."""
    requests = requests_over(server.url())
    assert requests.serve(1) == 0
    requests.settle()
    requests.forget()
    assert requests.serve(1) == TOKENS  # from the store
    server.process.kill()
    for _ in range(4):
        assert requests.serve(1) == TOKENS  # from memory
        requests.forget()
        assert requests.serve(3) == 0
        assert requests.serve(1) == 0
    assert requests.breaker() == 1
    assert requests.monitor.check_once()[L1].healthy
    assert requests.rig.storage.bypassed == {L3}
    server.process.start()
    requests.recovers()
    assert requests.breaker() == 0
    requests.forget()
    assert requests.serve(1) == TOKENS


def test_a_frozen_server_in_the_middle_of_loads_and_stores(server, requests_over):
    """Fault 34: SIGSTOP for a while; every request ends by its deadline, with right bytes."""
    requests = requests_over(server.url())
    for number in range(1, 4):
        requests.serve(number)
    requests.settle()
    freeze = threading.Timer(0.05, server.process.stop)
    freeze.start()
    until = time.monotonic() + STALL_S
    number = 0
    while time.monotonic() < until or number < 2:
        number += 1
        requests.forget()
        requests.serve(1 + number % 5)
        requests.monitor.check_once()
    freeze.join()
    opened = requests.breaker()
    server.process.cont()
    requests.recovers()
    assert requests.breaker() == 0
    assert opened == 1 or STALL_S < 5
    requests.serve(9)
    requests.settle()
    requests.forget()
    assert requests.serve(9) == TOKENS


def damage(path, how):
    """Change an object in place."""
    data = bytearray(path.read_bytes())
    if how == "emptied":
        data.clear()
    elif how in ("truncated", "breaks off"):
        del data[len(data) // 2 :]
    elif how == "header":
        data[100] ^= 1
    elif how == "payload":
        data[-1] ^= 1
    elif how == "longer":
        data += bytes(100)
    elif how == "huge":
        data += bytes(1 << 20)
    path.write_bytes(data)
    if how == "gone":
        path.unlink()


@pytest.mark.parametrize(
    "how", ["emptied", "truncated", "breaks off", "header", "payload", "longer", "huge", "gone"]
)
def test_objects_damaged_in_place(server, requests_over, metrics, how):
    """Faults 5, 44: the prefix ends before the damage, and the chunk is stored anew."""
    requests = requests_over(server.url())
    requests.serve(1)
    requests.settle()
    paths = server.objects()
    assert len(paths) == 7
    for path in paths[::2]:
        damage(path, how)
    if how != "breaks off":  # the server has the old size in a file of its own
        shutil.rmtree(server.folder / ".nanio-meta")
    requests.forget()
    assert requests.serve(1) < TOKENS
    requests.settle()
    for _ in range(3):  # a damage that only a read finds is behind the end of the prefix at first
        requests.forget()
        requests.serve(1)
        requests.settle()
    requests.forget()
    assert requests.serve(1) == TOKENS
    assert server.objects() == paths
    assert (count(metrics, "integrity_failures", tier=L3) > 0) == (how not in ("emptied", "gone"))
    assert requests.breaker() == 0


def test_a_server_whose_disk_is_full(requests_over, metrics):
    """It answers with errors, or keeps half of an object and says that it has it: a miss."""
    with s3_server(max_object_bytes=512) as server:
        requests = requests_over(server.url())
        for number in range(1, 4):
            assert requests.serve(number) == 0
            requests.settle()
            assert requests.serve(number) == TOKENS  # from memory
            requests.forget()
            assert requests.serve(number) == 0
        refused = count(metrics, "dropped_chunks", tier=L3)
        assert refused + count(metrics, "integrity_failures", tier=L3) > 0


def test_a_slow_network(server, requests_over):
    """Every byte right, 20 ms and 2 MB/s away."""
    with tcp_proxy(server.port, Weather(delay_s=0.02, bytes_per_second=2_000_000)) as proxy:
        requests = requests_over(server.url(proxy.port), lookup_timeout_s=10.0)
        for number in (1, 2):
            requests.serve(number)
            requests.settle()
        requests.forget()
        assert requests.serve(1) == TOKENS
        assert requests.serve(2) == TOKENS
        requests.settle()


def test_a_network_that_loses_connections(server, requests_over):
    """Fault 41: resets in the middle of anything; no answer belongs to another question."""
    with tcp_proxy(server.port) as proxy:
        requests = requests_over(server.url(proxy.port))
        for number in range(1, 4):
            requests.serve(number)
        requests.settle()
        for round_ in range(30):
            proxy.weather = Weather(reset_chance=0.15)
            requests.forget()
            requests.serve(1 + round_ % 6)
            requests.monitor.check_once()
        proxy.weather = Weather()
        requests.recovers()
        requests.serve(7)
        requests.settle()
        requests.forget()
        assert requests.serve(7) == TOKENS


def test_secrets_are_in_no_text(server, requests_over, metrics, caplog):
    """Not in what people are shown, and not in what is logged while everything fails."""
    requests = requests_over(server.url())
    server.process.kill()
    requests.serve(1)
    requests.forget()
    requests.serve(1)
    shown = [requests.remote.health().detail, caplog.text, repr(metrics.snapshot())]
    assert not any("secret-0123" in text or "kvkeep-access" in text for text in shown)
    server.process.start()
