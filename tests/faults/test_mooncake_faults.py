"""What happens to requests while a real Mooncake Store dies, freezes, forgets, fills up or is slow.

Its client blocks and cannot be ended (30 s with a frozen master), so this is also about callers
that go on, and memory that is kept until a late call has ended.
"""

from __future__ import annotations

import os
import time
import uuid

import pytest

from kvkeep.testing.chunks import wait_until
from support.remote import make_connector
from support.remote_requests import L1, L3, TOKENS, count
from support.servers.mooncake import mooncake_pool
from support.servers.proxy import slow_proxy_process

pytestmark = pytest.mark.mooncake

#: For how long servers are frozen; KVKEEP_STALL_SECONDS=20 is the full measure.
STALL_S = float(os.environ.get("KVKEEP_STALL_SECONDS", "1.5"))
#: The client's own time limit for an answer of the master, and some more.
LATE_S = 45.0


@pytest.fixture
def pool():
    with mooncake_pool() as pool:
        yield pool


@pytest.fixture
def requests_over(requests_over):
    """They are closed once no call is left to itself."""
    opened = []

    def make(url, **options):
        opened.append(requests_over(url, **options))
        return opened[-1]

    yield make
    for one in opened:
        wait_for_late_calls(one)


def wait_for_late_calls(requests):
    """Until each call that was left to itself has ended."""
    wait_until(lambda: requests.remote._connector._calls.num_late == 0, timeout_s=LATE_S)


def serve_for_a_while(requests):
    """Requests until the stall is over; each is checked."""
    until, number = time.monotonic() + STALL_S, 0
    while time.monotonic() < until or number < 2:
        number += 1
        requests.forget()
        requests.serve(1 + number % 4)
        requests.monitor.check_once()


def stores_again(requests, number):
    """What is stored now is found."""
    requests.serve(number)
    requests.settle()
    requests.forget()
    return requests.serve(number)


def test_a_killed_master_leaves_the_memory_tier_alone(pool, requests_over):
    """Faults 33, 35: L1 goes on; a new master knows nothing, which is a miss."""
    requests = requests_over(pool.url())
    requests.serve(1)
    requests.settle()
    requests.forget()
    assert requests.serve(1) == TOKENS  # from the store
    pool.master.kill()
    for _ in range(4):
        assert requests.serve(1) == TOKENS  # from memory
        requests.forget()
        assert requests.serve(3) == 0
        assert requests.serve(1) == 0
    assert requests.breaker() == 1
    assert requests.monitor.check_once()[L1].healthy
    pool.master.start()
    pool.wait_joined()
    requests.recovers()
    assert requests.breaker() == 0
    requests.forget()
    assert requests.serve(1) == 0
    assert stores_again(requests, 2) == TOKENS


def test_a_frozen_master(pool, requests_over):
    """Fault 34: nobody waits for the client's own 30 s; memory is whole once it answers."""
    requests = requests_over(pool.url())
    for number in range(1, 4):
        requests.serve(number)
    requests.settle()
    pool.master.stop()
    serve_for_a_while(requests)
    pool.master.cont()
    requests.recovers()
    assert requests.breaker() == 0
    assert stores_again(requests, 9) == TOKENS


def test_a_frozen_machine_of_the_pool(pool, requests_over):
    """Fault 34: a transfer that hangs keeps its memory, and its memory alone, until it ends."""
    requests = requests_over(pool.url())
    for number in range(1, 4):
        requests.serve(number)
    requests.settle()
    pool.store.stop()
    serve_for_a_while(requests)
    pool.store.cont()
    wait_for_late_calls(requests)
    pool.wait_joined()
    requests.recovers()
    assert requests.breaker() == 0
    wait_until(lambda: stores_again(requests, 9) == TOKENS, timeout_s=LATE_S)


def test_a_machine_of_the_pool_that_is_gone(pool, requests_over):
    """Its chunks are misses; when memory is back, chunks are stored again."""
    requests = requests_over(pool.url())
    requests.serve(1)
    requests.settle()
    pool.store.kill()
    requests.forget()
    assert requests.serve(1) == 0
    requests.settle()
    pool.store.start()
    pool.wait_joined()
    requests.recovers()
    wait_until(lambda: stores_again(requests, 2) == TOKENS, timeout_s=LATE_S)


@pytest.mark.parametrize("how", ["header", "payload", "truncated", "emptied"])
def test_values_damaged_in_place(pool, requests_over, metrics, how):
    """Faults 5, 44: the prefix ends before the damage, and the chunk is stored anew."""
    requests = requests_over(pool.url())
    requests.serve(1)
    requests.settle()
    other = make_connector(pool.url(), max_value_bytes=1 << 20)
    names = sorted(other.names("kvkeep-v1/", 10.0))
    assert len(names) == 7
    for name in names[::2]:
        damage(other, name, how)
    other.close()
    requests.forget()
    assert requests.serve(1) < TOKENS
    requests.settle()
    for _ in range(3):  # a damage that only a read finds is behind the end of the prefix at first
        requests.forget()
        requests.serve(1)
        requests.settle()
    requests.forget()
    assert requests.serve(1) == TOKENS
    assert (count(metrics, "integrity_failures", tier=L3) > 0) == (how != "emptied")
    assert requests.breaker() == 0


def damage(connector, name, how):
    """Put another value in its place, through a client of its own."""
    client = connector._client.ready(time.monotonic() + 10.0)
    data = bytearray(client.get(name))
    assert client.remove(name, True) == 0
    if how == "emptied":
        return
    if how == "truncated":
        del data[len(data) // 2 :]
    else:
        data[100 if how == "header" else -1] ^= 1
    assert client.put(name, bytes(data)) == 0


@pytest.fixture
def small_pool():
    with mooncake_pool(segment_bytes=16 << 20) as pool:
        yield pool


def fill_up(client):
    """Put other people's values in until there is no room; their leases keep them from eviction."""
    names = []
    for size in (1 << 20, 1 << 18, 1 << 14, 1 << 10, 1 << 14, 1 << 10):
        while client.put(name := f"other/{uuid.uuid4()}", bytes(size)) == 0:
            names.append(name)
            assert client.batch_is_exist(names[-1:]) == [1]
            assert len(names) < 3000


def test_a_pool_without_room(small_pool, requests_over, metrics):
    """Chunks are dropped and counted; what is found is right; the tier goes on."""
    requests = requests_over(small_pool.url())
    other = make_connector(small_pool.url(), max_value_bytes=1 << 20)
    client = other._client.ready(time.monotonic() + 10.0)
    for number in range(1, 6):
        fill_up(client)
        requests.serve(number)
        requests.settle()
    assert count(metrics, "dropped_chunks", tier=L3, cause="store_full") > 0
    assert requests.breaker() == 0
    assert client.remove_all(True) >= 0
    other.close()
    wait_until(lambda: stores_again(requests, 9) == TOKENS, timeout_s=LATE_S)


def test_a_slow_network(pool, requests_over):
    """Every byte right, with the master 20 ms away."""
    with slow_proxy_process(pool.port, 0.02) as port:
        requests = requests_over(pool.url(port), lookup_timeout_s=10.0, load_timeout_s=5.0)
        for number in (1, 2):
            requests.serve(number)
            requests.settle()
        requests.forget()
        assert requests.serve(1) == TOKENS
        assert requests.serve(2) == TOKENS
