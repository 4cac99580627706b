"""RedisConnector over real servers: URLs, greetings, memory, time to live, failover."""

from __future__ import annotations

import mmap
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.base import HEADER_BYTES, Refusal, Value
from kvkeep.backends.remote.redis_connector import MAX_STRING_BYTES
from kvkeep.backends.slow_tier import PIECE_BYTES
from kvkeep.config.base import RemoteURL
from kvkeep.errors import BackendError, BackendTimeoutError, ConfigError
from kvkeep.testing.chunks import wait_until
from kvkeep.testing.remote_stores import (
    OPTIONS,
    WAIT_S,
    TestingSink,
    bytes_of_value,
    random_value,
    read,
)
from support.servers.certificates import make_certificates
from support.servers.proxy import Weather, tcp_proxy
from support.servers.redis import (
    RedisOptions,
    redis_cluster,
    redis_sentinel,
    redis_server,
)

NAMES = [f"kvkeep-v1/test/{number:064x}" for number in range(6)]


def connect(url, **options):
    return create_connector(RemoteURL.parse(url), replace(OPTIONS, **options))


@pytest.fixture(scope="module")
def server():
    with redis_server(RedisOptions(password="hush")) as server:
        yield server


@pytest.fixture
def connector(server):
    server.command("FLUSHALL")
    connector = connect(server.url)
    yield connector
    connector.close()


def info(server, section, name):
    """One number of a server's INFO."""
    return int(re.search(rb"%b:(\d+)" % name.encode(), server.command("INFO", section))[1])


# -- URLs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h/x", "database"),
        ("redis://h/1/2", "host:port/database"),
        ("redis://h:99999", "host:port"),
        ("redis://h:port", "host:port"),
        ("redis://", "host:port"),
        ("redis://a,b", "host:port"),
        ("redis://h?decode_responses=true", "no option decode_responses"),
        ("redis://h?ssl_ca_certs=/x", "no option ssl_ca_certs"),
        ("rediss://h?ssl_check_hostname=perhaps", "true or false"),
        ("redis-cluster://h/1", "no databases"),
        ("redis-sentinel://h", "service"),
        ("redis-sentinel://h/s/x", "database"),
        ("unix:///s?db=x", "database"),
        ("gopher://h", "gopher://; known:"),
    ],
)
def test_urls_that_are_wrong_say_how_to_write_them(url, words):
    """Fault 45."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        connect(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "valkey://user:pass@[::1]:7/3?client_name=me",
        "rediss://h?ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
        "valkeys-cluster://a:1,b,c:3",
        "redis-sentinel://a:1,b/service/2?sentinel_password=x",
        "unix:///run/redis.sock?db=1",
    ],
)
def test_nothing_is_connected_before_it_is_needed(url):
    """A store that is down at the start is no error."""
    connect(url).close()


# -- greetings -----------------------------------------------------------------------------------


def test_a_wrong_password_is_an_error_without_it(server):
    """Fault 48."""
    connector = connect(f"redis://:not-hush@127.0.0.1:{server.port}")
    with pytest.raises(BackendError) as caught:
        connector.ping(WAIT_S)
    assert type(caught.value.__cause__).__name__ == "AuthenticationError"
    assert "hush" not in f"{caught.value} {connector.description}"
    connector.close()


def test_no_password_where_one_is_needed(server):
    connector = connect(f"redis://127.0.0.1:{server.port}")
    for call in (connector.ping, lambda _: connector.sizes(NAMES, WAIT_S)):
        with pytest.raises(BackendError, match="NOAUTH"):
            call(WAIT_S)
    with pytest.raises(BackendError, match="NOAUTH"):
        connector.put(NAMES[:1], [random_value(300)], WAIT_S)
    with pytest.raises(BackendError, match="NOAUTH"):
        connector.get(NAMES[:1], [TestingSink()], WAIT_S)
    connector.close()


def test_a_certificate_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    server_side, other = make_certificates(tmp_path / "a"), make_certificates(tmp_path / "b")
    with redis_server(RedisOptions(certificates=server_side)) as server:
        for authority, works in ((other.authority, False), (server_side.authority, True)):
            connector = connect(f"{server.url}?ssl_ca_certs={authority}")
            if works:
                connector.ping(WAIT_S)
            else:
                with pytest.raises(BackendError, match=r"(?i)certificate"):
                    connector.ping(WAIT_S)
            connector.close()


def test_a_port_where_nobody_listens(server):
    connector = connect("redis://127.0.0.1:1")
    with pytest.raises(BackendError, match=r"127\.0\.0\.1:1"):
        connector.ping(WAIT_S)
    connector.close()


# -- values --------------------------------------------------------------------------------------


def test_one_key_per_value_and_nothing_else(connector, server):
    """Fault 40: there is no second key that could be evicted alone."""
    connector.put(NAMES, [random_value(400, number) for number in range(6)], WAIT_S)
    assert server.command("DBSIZE") == b":6\r\n"
    assert server.command("TYPE", NAMES[0]) == b"+string\r\n"


def test_something_else_under_a_name(connector, server):
    """A list under a chunk's name is no value; it is shown as impossible, and can be removed."""
    server.command("RPUSH", NAMES[1], "x")
    value = random_value(300)
    connector.put([NAMES[0], NAMES[2]], [value, value], WAIT_S)
    assert connector.sizes(NAMES[:3], WAIT_S) == [300, 1, 300]
    sinks = [TestingSink() for _ in range(3)]
    connector.get(NAMES[:3], sinks, WAIT_S)
    assert [sink.data for sink in sinks] == [bytes_of_value(value), None, bytes_of_value(value)]
    assert sinks[1].failure == "wrong_type"
    assert connector.remove(NAMES[:3], WAIT_S) == [True] * 3


def test_a_time_to_live(server):
    server.command("FLUSHALL")
    connector = connect(server.url, ttl_s=0.2)
    connector.put(NAMES[:1], [random_value(300)], WAIT_S)
    assert connector.sizes(NAMES[:1], WAIT_S) == [300]
    wait_until(lambda: connector.sizes(NAMES[:1], WAIT_S) == [0])
    connector.close()


def test_a_full_server_refuses_and_still_answers():
    """``noeviction``: every value is taken or refused, and the connection goes on."""
    options = RedisOptions(max_memory_bytes=6 << 20, eviction="noeviction")
    with redis_server(options) as server:
        connector = connect(server.url)
        answers = []
        for round_ in range(4):
            values = [random_value(400_000, 10 * round_ + i) for i in range(6)]
            names = [f"{name}{round_}" for name in NAMES]
            answers += connector.put(names, values, WAIT_S)
        assert set(answers) == {None, Refusal.FULL}
        sizes = []
        for round_ in range(4):
            sizes += connector.sizes([f"{name}{round_}" for name in NAMES], WAIT_S)
        assert [size > 0 for size in sizes] == [answer is None for answer in answers]
        assert info(server, "stats", "total_connections_received") < 12
        connector.close()


def test_a_value_that_redis_cannot_hold(connector):
    """It is refused before anything is sent."""
    value = random_value(300)
    with mmap.mmap(-1, MAX_STRING_BYTES) as untouched:  # takes no memory
        large = Value(value.header, memoryview(untouched)[: MAX_STRING_BYTES - 255])
        assert connector.put(NAMES[:2], [large, value], WAIT_S) == [Refusal.TOO_LARGE, None]
        large.payload.release()


def test_a_lookup_is_one_round_trip(connector, server):
    """Hundreds of names are asked for together, over one connection."""
    before = info(server, "stats", "total_reads_processed")
    names = [f"{number:064x}" for number in range(512)]
    connector.sizes(names, WAIT_S)
    after = info(server, "stats", "total_reads_processed")
    assert after - before < 40


# -- large values, piece by piece ----------------------------------------------------------------

#: Of four pieces, the last one short.
LARGE_BYTES = 3 * PIECE_BYTES + 1000


class ActingSink(TestingSink):
    """A sink that does something once the first piece is in."""

    def __init__(self, act):
        super().__init__()
        self._act = act

    def filled(self, payload_bytes):
        super().filled(payload_bytes)
        if payload_bytes >= PIECE_BYTES - HEADER_BYTES and self._act is not None:
            act, self._act = self._act, None
            act()


def commands_of(server):
    """How often each command was called, by its name."""
    text = server.command("INFO", "commandstats").decode()
    return {name: int(calls) for name, calls in re.findall(r"cmdstat_(\w+):calls=(\d+)", text)}


def test_a_large_value_comes_in_pieces(connector, server):
    """No answer is larger than a piece: the server's memory for it stays in the cache."""
    values = [random_value(size, size) for size in (300, PIECE_BYTES, PIECE_BYTES + 1, LARGE_BYTES)]
    names = NAMES[:4]
    connector.put(names, values, WAIT_S)
    server.command("CONFIG", "RESETSTAT")
    before = info(server, "stats", "total_connections_received")
    assert read(connector, names) == [bytes_of_value(value) for value in values]
    counts = commands_of(server)
    assert "get" not in counts
    assert counts["strlen"] == 4
    assert counts["getrange"] == 4 + (1 + 1) + (3 + 1)  # first pieces, others, headers again
    assert info(server, "stats", "total_connections_received") - before <= 3


def test_small_chunks_are_read_whole(server):
    """One command each, where no value can be larger than a piece."""
    connector = connect(server.url, max_value_bytes=HEADER_BYTES + PIECE_BYTES)
    value = random_value(5000)
    connector.put(NAMES[:1], [value], WAIT_S)
    server.command("CONFIG", "RESETSTAT")
    assert read(connector, NAMES[:1]) == [bytes_of_value(value)]
    counts = commands_of(server)
    assert counts["get"] == 1
    assert "getrange" not in counts
    connector.close()


@pytest.mark.parametrize("size_bytes", [LARGE_BYTES, LARGE_BYTES - 1000, LARGE_BYTES + 1000])
def test_a_value_that_is_replaced_between_its_pieces_is_unfinished(connector, server, size_bytes):
    """It is a miss: never a mixture of both, and not taken for damage."""
    old, new = random_value(LARGE_BYTES, 1), random_value(size_bytes, 2)
    other = connect(server.url)
    connector.put(NAMES[:1], [old], WAIT_S)
    sink, after = ActingSink(lambda: other.put(NAMES[:1], [new], WAIT_S)), TestingSink()
    connector.put(NAMES[1:2], [old], WAIT_S)
    connector.get(NAMES[:2], [sink, after], WAIT_S)
    assert sink.header == old.header
    assert not sink.is_finished
    assert sink.failure is None
    assert after.data == bytes_of_value(old)
    assert read(connector, NAMES[:1]) == [bytes_of_value(new)]
    other.close()


@pytest.mark.parametrize("command", [("DEL",), ("RPUSH", "x")])
def test_a_value_that_goes_between_its_pieces_is_unfinished(connector, server, command):
    """Evicted, or a list now: the answers that follow are the next value's."""
    value = random_value(LARGE_BYTES)
    connector.put(NAMES[:2], [value, value], WAIT_S)

    def go():
        server.command("DEL", NAMES[0])
        server.command(command[0], NAMES[0], *command[1:])

    sink, after = ActingSink(go), TestingSink()
    connector.get(NAMES[:2], [sink, after], WAIT_S)
    assert not sink.is_finished
    assert after.data == bytes_of_value(value)


def test_a_large_value_that_is_refused_is_not_read_to_its_end(connector, server):
    """What was asked for is skipped, and the next answer is the next value's."""
    values = [random_value(LARGE_BYTES, seed) for seed in range(3)]
    connector.put(NAMES[:3], values, WAIT_S)
    server.command("CONFIG", "RESETSTAT")
    sinks = [TestingSink(), TestingSink(refuse=True), TestingSink()]
    connector.get(NAMES[:3], sinks, WAIT_S)
    wanted = [bytes_of_value(values[0]), None, bytes_of_value(values[2])]
    assert [sink.data for sink in sinks] == wanted
    assert commands_of(server)["getrange"] == 5 + 2 + 5


@pytest.mark.parametrize("refused", ["getrange", "strlen"])
def test_a_user_who_may_not_ask_for_pieces_gets_whole_values(server, refused):
    """Rules that were written before there were pieces go on working; no value is removed."""
    server.command("FLUSHALL")
    rules = ["on", ">pw", "~*", "+@all", f"-{refused}"]
    server.command("ACL", "SETUSER", "limited", *rules)
    connector = connect(f"redis://limited:pw@127.0.0.1:{server.port}")
    values = [random_value(LARGE_BYTES, seed) for seed in range(3)]
    connector.put(NAMES[:3], values, WAIT_S)
    sinks = [TestingSink() for _ in range(4)]
    connector.get(NAMES[:4], sinks, WAIT_S)
    assert [sink.data for sink in sinks] == [*map(bytes_of_value, values), None]
    assert [sink.failure for sink in sinks] == [None] * 4
    connector.close()


# -- connections ---------------------------------------------------------------------------------


def test_connections_are_used_again(connector, server):
    before = info(server, "stats", "total_connections_received")
    for _ in range(20):
        connector.put(NAMES, [random_value(400)] * 6, WAIT_S)
        read(connector, NAMES)
        connector.sizes(NAMES, WAIT_S)
        connector.remove(NAMES, WAIT_S)
    after = info(server, "stats", "total_connections_received")
    assert after - before <= 3  # INFO itself takes two of them


def test_closing_leaves_no_connection(server):
    """Not one that was idle, and not one that is under way."""
    before = info(server, "clients", "connected_clients")
    connector = connect(server.url)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: connector.sizes(NAMES, WAIT_S), range(8)))
    assert info(server, "clients", "connected_clients") > before
    connector.close()
    wait_until(lambda: info(server, "clients", "connected_clients") == before)


def test_a_restarted_server_is_noticed():
    """Fault 35: idle connections are dead after a restart; the next call does not see it."""
    with redis_server(RedisOptions(persistent=True)) as server:
        connector = connect(server.url)
        value = random_value(5000)
        connector.put(NAMES[:1], [value], WAIT_S)
        server.process.restart()
        assert read(connector, NAMES[:1]) == [bytes_of_value(value)]
        connector.close()


def test_after_a_failure_no_old_connection_is_used(server):
    """All idle ones may be dead without saying so: behind a network that lost them."""
    with tcp_proxy(server.port) as proxy:
        connector = connect(f"redis://:hush@127.0.0.1:{proxy.port}")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: connector.sizes(NAMES, WAIT_S), range(8)))
        before = proxy.connections
        proxy.weather = Weather(stalled=True)
        with pytest.raises(BackendTimeoutError):
            connector.sizes(NAMES, 0.3)
        proxy.weather = Weather()
        connector.sizes(NAMES, WAIT_S)
        assert proxy.connections == before + 1
        connector.close()


def test_a_frozen_server_meets_the_deadline(server):
    """Fault 34: SIGSTOP; and what it says late belongs to nobody (fault 41)."""
    server.command("FLUSHALL")
    connector = connect(server.url, connect_timeout_s=0.3)
    values = [random_value(3000 + number, number) for number in range(6)]
    connector.put(NAMES, values, WAIT_S)
    server.process.stop()
    try:
        for call in (
            lambda: connector.sizes(NAMES, 0.2),
            lambda: read_within(connector, 0.2),
            lambda: connector.ping(0.2),
            lambda: connector.put(NAMES[:1], values[:1], 0.2),
        ):
            started = time.monotonic()
            with pytest.raises(BackendTimeoutError):
                call()
            assert time.monotonic() - started < 10
    finally:
        server.process.cont()
    for _ in range(3):
        assert read(connector, NAMES) == [bytes_of_value(value) for value in values]
        assert connector.sizes(NAMES, WAIT_S) == [3000 + number for number in range(6)]
    connector.close()


def read_within(connector, timeout_s):
    sinks = [TestingSink() for _ in NAMES]
    connector.get(NAMES, sinks, timeout_s)


# -- several servers -----------------------------------------------------------------------------


def test_a_cluster_spreads_values_and_finds_them_after_a_slot_has_moved():
    """MOVED is followed by the client, which learns where the slot is."""
    with redis_cluster() as servers:
        connector = connect(f"redis-cluster://127.0.0.1:{servers[0].port}")
        names = [f"kvkeep-v1/test/{number:064x}" for number in range(60)]
        values = [random_value(300 + number, number) for number in range(60)]
        assert connector.put(names, values, WAIT_S) == [None] * 60
        held = [int(server.command("DBSIZE")[1:-2]) for server in servers]
        assert sum(held) == 60
        assert min(held) > 5
        slot = int(servers[0].command("CLUSTER", "KEYSLOT", names[0])[1:-2])
        move_slot(servers, slot)
        assert read(connector, names) == [bytes_of_value(value) for value in values]
        assert connector.sizes(names[:1], WAIT_S) == [300]
        assert connector.put(names[:1], values[1:2], WAIT_S) == [None]
        assert read(connector, names[:1]) == [bytes_of_value(values[1])]
        assert connector.remove(names, WAIT_S) == [True] * 60
        connector.close()


def move_slot(servers, slot):
    """Give a slot and its values to another master."""
    ids = [server.command("CLUSTER", "MYID").split(b"\r\n")[1].decode() for server in servers]
    owner = next(
        index
        for index, server in enumerate(servers)
        if not server.command("CLUSTER", "COUNTKEYSINSLOT", slot).startswith(b":0")
    )
    target = (owner + 1) % len(servers)
    servers[target].command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner])
    servers[owner].command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    while not (reply := servers[owner].command("CLUSTER", "GETKEYSINSLOT", slot, 1)).startswith(
        b"*0"
    ):
        name = reply.split(b"\r\n")[2].decode()
        servers[owner].command("MIGRATE", "127.0.0.1", servers[target].port, name, 0, 5000)
    for server in (servers[target], servers[owner], *servers):
        server.command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


def test_a_replica_is_read_only_and_a_failover_is_followed():
    """The new master is found through the sentinel, and what was replicated is there."""
    with redis_sentinel() as watched:
        replica = connect(watched.replica.url)
        assert replica.put(NAMES[:1], [random_value(300)], WAIT_S) == [Refusal.READ_ONLY]
        with pytest.raises(BackendError, match="READONLY"):
            replica.remove(NAMES[:1], WAIT_S)
        replica.close()
        connector = connect(watched.url)
        value = random_value(5000)
        connector.put(NAMES[:1], [value], WAIT_S)
        wait_until(lambda: watched.replica.command("STRLEN", NAMES[0]) == b":5000\r\n")
        watched.master.process.kill()

        def works():
            try:
                return connector.put(NAMES[1:2], [value], 5.0) == [None]
            except BackendError:
                return False

        wait_until(works, timeout_s=60)
        assert read(connector, NAMES[:2]) == [bytes_of_value(value)] * 2
        connector.close()
