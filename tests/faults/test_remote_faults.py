"""What happens to requests while a real Redis dies, freezes, forgets, fills up or is far away.

Every request ends by its deadline with the right bytes; the memory tier goes on; the breaker opens
and closes; nothing stays held.
"""

from __future__ import annotations

import os
import re
import threading
import time

import pytest

from kvkeep.testing.chunks import check_found, make_keys, make_pool, put, wait_until
from support.remote import make_connector, make_remote, name_of
from support.remote_requests import L1, L3, count
from support.servers.proxy import Weather, tcp_proxy
from support.servers.redis import RedisOptions, redis_cluster, redis_server

#: For how long servers are frozen; KVKEEP_STALL_SECONDS=20 is the full measure.
STALL_S = float(os.environ.get("KVKEEP_STALL_SECONDS", "1.5"))
KEYS = make_keys(6)


@pytest.fixture
def server():
    with redis_server() as server:
        yield server


@pytest.fixture
def pool():
    pool = make_pool()
    yield pool
    pool.clear()
    wait_until(lambda: pool.memcheck().num_objects == 0)
    pool.close()


# -- the server goes -----------------------------------------------------------------------------


def test_a_killed_server_leaves_the_memory_tier_alone(server, requests_over):
    """Fault 33: one dead remote never switches off L1. The breaker opens, and closes again."""
    requests = requests_over(server.url)
    assert requests.serve(1) == 0
    requests.settle()
    requests.forget()
    assert requests.serve(1) == 56  # from the store
    server.process.kill()
    for _ in range(4):
        assert requests.serve(1) == 56  # from memory
        assert requests.serve(2) in (0, 56)
        requests.forget()
        assert requests.serve(3) == 0  # was never anywhere
        assert requests.serve(1) == 0
    assert requests.breaker() == 1
    assert requests.monitor.check_once()[L1].healthy
    assert requests.rig.storage.bypassed == {L3}
    assert requests.serve(1) == 56
    server.process.start()
    requests.recovers()
    assert requests.breaker() == 0
    requests.serve(4)
    requests.settle()
    requests.forget()
    assert requests.serve(4) == 56


def test_a_frozen_server_in_the_middle_of_loads_and_stores(server, requests_over):
    """Fault 34: SIGSTOP for a while; every request ends by its deadline, with right bytes."""
    requests = requests_over(server.url)
    for number in range(1, 4):
        requests.serve(number)
    requests.settle()
    freeze = threading.Timer(0.05, server.process.stop)
    freeze.start()
    until = time.monotonic() + STALL_S
    number = 0
    while time.monotonic() < until:
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
    assert requests.serve(9) == 56


def test_a_server_that_was_restarted(server, requests_over):
    """Fault 35: nobody notices but by misses, and what was lost is stored again."""
    requests = requests_over(server.url)
    requests.serve(1)
    requests.settle()
    server.process.restart()  # it keeps nothing
    requests.forget()
    assert requests.serve(1) == 0
    requests.settle()
    requests.forget()
    assert requests.serve(1) == 56
    assert requests.breaker() == 0


def test_a_server_that_is_not_there_at_the_start(server, requests_over):
    """The engine starts without it, and uses it once it comes."""
    server.process.kill()
    requests = requests_over(server.url)
    requests.serve(1)
    assert requests.serve(1) == 56
    server.process.start()
    requests.recovers()
    requests.serve(2)
    requests.settle()
    requests.forget()
    assert requests.serve(2) == 56


def test_a_cluster_that_loses_a_master(requests_over):
    """The tier is left out while a part of the slots is served by nobody, and comes back."""
    with redis_cluster() as servers:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        requests = requests_over(f"redis-cluster://{hosts}")
        for number in (1, 2):
            requests.serve(number)
        requests.settle()
        requests.forget()
        assert requests.serve(1) == 56
        servers[1].process.kill()
        for number in range(3, 9):
            requests.forget()
            requests.serve(number)
            assert requests.serve(number) == 56  # from memory
            requests.monitor.check_once()
        wait_until(lambda: requests.monitor.check_once()[L3].healthy is False)
        servers[1].process.start()
        requests.recovers()
        requests.serve(9)
        requests.settle()
        requests.forget()
        assert requests.serve(9) == 56


# -- values --------------------------------------------------------------------------------------


def names_in(server):
    """Every key of the server."""
    found = server.command("KEYS", "kvkeep-v1/*").split(b"\r\n")
    return sorted(part.decode() for part in found if part.startswith(b"kvkeep-v1/"))


def damage(server, name, how):
    """Change a value in place."""
    if how == "emptied":
        server.command("SET", name, "")
    elif how == "truncated":
        server.command("SET", name, "KVKCHUNK-and-then-nothing")
    elif how == "header":
        server.command("SETRANGE", name, 100, "XXXX")
    elif how == "payload":
        server.command("SETRANGE", name, 300, "XXXX")
    elif how == "longer":
        server.command("APPEND", name, "XXXX")
    elif how == "huge":
        server.command("SETRANGE", name, 50_000_000, "X")
    elif how == "list":
        server.command("DEL", name)
        server.command("RPUSH", name, "x")
    else:
        server.command("DEL", name)


DAMAGES = ["emptied", "truncated", "header", "payload", "longer", "huge", "list", "gone"]


@pytest.mark.parametrize("how", DAMAGES)
def test_values_damaged_in_place(server, requests_over, metrics, how):
    """Faults 5, 44: the prefix ends before the damage, and the chunk is stored anew."""
    requests = requests_over(server.url)
    requests.serve(1)
    requests.settle()
    names = names_in(server)
    assert len(names) == 7
    for name in names[::2]:
        damage(server, name, how)
    requests.forget()
    assert requests.serve(1) < 56
    requests.settle()
    for _ in range(3):  # a damage that only a read finds is behind the end of the prefix at first
        requests.forget()
        requests.serve(1)
        requests.settle()
    requests.forget()
    assert requests.serve(1) == 56
    assert names_in(server) == names
    integrity = count(metrics, "integrity_failures", tier=L3)
    assert (integrity > 0) == (how not in ("emptied", "gone"))
    assert requests.breaker() == 0


def test_values_swapped_between_keys(server, requests_over, metrics):
    """Faults 1, 41: whole frames under each other's names are never served."""
    requests = requests_over(server.url)
    requests.serve(1)
    requests.settle()
    names = names_in(server)
    for one, other in zip(names[::2], names[1::2], strict=False):
        server.command("RENAME", one, "aside")
        server.command("RENAME", other, one)
        server.command("RENAME", "aside", other)
    requests.forget()
    assert requests.serve(1) < 56
    requests.settle()
    assert count(metrics, "failures", tier=L3, cause="wrong_key") > 0


# -- memory of the server ------------------------------------------------------------------------


def test_a_server_without_room(requests_over, metrics):
    """``noeviction``: chunks are dropped and counted; loads go on; no breaker opens."""
    options = RedisOptions(max_memory_bytes=3 << 20, eviction="noeviction")
    with redis_server(options) as server:
        requests = requests_over(server.url, pool_chunks=24)
        requests.serve(1)
        requests.settle()
        assert server.command("SET", "other", "x" * 1_000_000)
        fill_up(server)
        for number in range(2, 9):
            requests.serve(number)
            requests.settle()
        assert count(metrics, "dropped_chunks", tier=L3, cause="store_full") > 0
        assert requests.breaker() == 0
        requests.forget()
        assert requests.serve(1) == 56
        assert requests.monitor.check_once()[L3].healthy


def fill_up(server):
    """Put other people's values in until there is no room."""
    for size in (60_000, 2_000, 10):
        number = 0
        while server.command("SETRANGE", f"other{size}/{number}", size, "x").startswith(b":"):
            number += 1
            assert number < 10_000


def test_a_server_that_evicts(requests_over, metrics):
    """Fault 40: ``allkeys-lru``; a chunk is there as a whole or not at all."""
    options = RedisOptions(max_memory_bytes=2 << 20, eviction="allkeys-lru")
    with redis_server(options) as server:
        requests = requests_over(server.url)
        found = []
        for number in range(60):
            requests.serve(1 + number % 30)
            requests.settle()
            server.command("SETRANGE", f"other{number}", 60_000, "x")
            requests.forget()
            found.append(requests.serve(1 + (number // 2) % 30))
        assert int(re.search(rb"evicted_keys:(\d+)", server.command("INFO", "stats"))[1]) > 0
        assert 0 < sum(found) < 60 * 56
        assert count(metrics, "integrity_failures", tier=L3) == 0
        assert requests.breaker() == 0


# -- the network ---------------------------------------------------------------------------------


def test_a_slow_network(server, requests_over):
    """Every byte right, 20 ms and 2 MB/s away."""
    with tcp_proxy(server.port, Weather(delay_s=0.02, bytes_per_second=2_000_000)) as proxy:
        requests = requests_over(f"redis://127.0.0.1:{proxy.port}", lookup_timeout_s=10.0)
        for number in (1, 2):
            requests.serve(number)
            requests.settle()
        requests.forget()
        assert requests.serve(1) == 56
        assert requests.serve(2) == 56
        requests.settle()


def test_a_network_that_loses_connections(server, requests_over):
    """Fault 41: resets in the middle of anything; no answer belongs to another question."""
    with tcp_proxy(server.port) as proxy:
        requests = requests_over(f"redis://127.0.0.1:{proxy.port}")
        for number in range(1, 4):
            requests.serve(number)
        requests.settle()
        for round_ in range(60):
            proxy.weather = Weather(reset_chance=0.15)
            requests.forget()
            requests.serve(1 + round_ % 6)
            requests.monitor.check_once()
        proxy.weather = Weather()
        requests.recovers()
        requests.serve(7)
        requests.settle()
        requests.forget()
        assert requests.serve(7) == 56


@pytest.mark.parametrize("after_bytes", [1, 60, 300, 900])
def test_a_connection_that_ends_in_the_middle_of_a_value(server, pool, metrics, after_bytes):
    """Fault 41: what was begun is not finished from the next connection."""
    plain = make_remote(pool, server.url)
    put(plain, pool, KEYS)
    with tcp_proxy(server.port, Weather(reset_after_bytes=after_bytes)) as proxy:
        remote = make_remote(pool, f"redis://127.0.0.1:{proxy.port}", metrics=metrics)
        for _ in range(4):
            check_found(KEYS, remote.batched_get_blocking(KEYS))
        proxy.weather = Weather()
        wait_until(lambda: remote.health().healthy)
        assert check_found(KEYS, remote.batched_get_blocking(KEYS)) == [True] * 6
        remote.close()
    plain.close()


def test_late_answers_belong_to_nobody(server, pool):
    """Fault 41: after deadlines that passed in the middle of an answer, each one is its own."""
    connector = make_connector(server.url)
    plain = make_remote(pool, server.url)
    put(plain, pool, KEYS)
    with tcp_proxy(server.port, Weather(delay_s=0.15)) as proxy:
        remote = make_remote(
            pool,
            f"redis://127.0.0.1:{proxy.port}",
            load_timeout_s=0.4,
            lookup_timeout_s=0.2,
            probe_timeout_s=5.0,
        )
        for round_ in range(12):
            proxy.weather = Weather(delay_s=0.0 if round_ % 3 == 0 else 0.15)
            remote.batched_contains(KEYS)
            check_found(KEYS, remote.batched_get_blocking(KEYS))
        proxy.weather = Weather()
        wait_until(lambda: remote.health().healthy)
        wait_until(lambda: check_found(KEYS, remote.batched_get_blocking(KEYS)) == [True] * 6)
        assert connector.sizes([name_of(key) for key in KEYS], 5.0) == [448] * 6
        remote.close()
    plain.close()
    connector.close()


def test_stores_wait_in_a_bounded_queue(server, requests_over, metrics):
    """Fault 43: behind a network that stands still, memory is bounded and requests go on."""
    with tcp_proxy(server.port) as proxy:
        bound = 4 * 3 * 2 * 64  # bytes of four chunks: three layers of two pages
        requests = requests_over(
            f"redis://127.0.0.1:{proxy.port}", pool_chunks=40, queue_bytes=bound
        )
        proxy.weather = Weather(stalled=True)
        for number in range(2, 12):
            requests.serve(number)
            held = [obj for obj in requests.rig.cpu.hot_cache.values() if obj.ref_count > 1]
            assert len(held) <= 4 + 4 + 2 * 4  # the queue, its last request, two threads
        assert count(metrics, "failures", tier=L3, operation="put") > 0
        assert requests.serve(11) == 56  # from memory
        proxy.weather = Weather()
        requests.recovers()
