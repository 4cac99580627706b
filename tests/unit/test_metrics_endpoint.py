"""The endpoint: who may read what, over which socket, and what it does with bad clients."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import ssl
import stat
import time
from contextlib import closing
from pathlib import Path

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.metrics import Metrics
from kvkeep.metrics.endpoint import (
    MAX_CONNECTIONS,
    EndpointOptions,
    MetricsEndpoint,
    place_of_rank,
)

LOOPBACK = ("127.0.0.1", 0)


@pytest.fixture
def open_endpoint():
    opened = []

    def make(place=LOOPBACK, exposition=None, **options) -> MetricsEndpoint:
        endpoint = MetricsEndpoint(
            EndpointOptions(place, **options), exposition or Metrics().exposition
        )
        opened.append(endpoint)
        return endpoint

    yield make
    for endpoint in opened:
        endpoint.close()
        endpoint.close()


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(5)
        self.sock.connect(str(self._path))


def get(endpoint: MetricsEndpoint, path="/metrics", method="GET", headers=None, tls=None):
    place = endpoint.place
    if isinstance(place, Path):
        connection: http.client.HTTPConnection = UnixConnection(place)
    elif tls is not None:
        connection = http.client.HTTPSConnection(*place, timeout=30, context=tls)
    else:
        connection = http.client.HTTPConnection(*place, timeout=30)
    with closing(connection):
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


def test_it_serves_what_was_counted(open_endpoint):
    metrics = Metrics()
    metrics.lookup(asked=100, found={"LocalCPUBackend": 60})
    endpoint = open_endpoint(exposition=metrics.exposition)
    for expected in (60, 65):
        status, text, headers = get(endpoint)
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["kvkeep_lookup_hit_tokens"].samples[0].value == expected
        metrics.lookup(asked=5, found={"LocalCPUBackend": 5})


def test_it_serves_nothing_else(open_endpoint):
    """Fault 48: an endpoint shows its numbers and has no other page."""
    endpoint = open_endpoint()
    for path in ("/", "/metrics/", "/env", "/../metrics", "/metrics%2f", "/metric"):
        status, text, _ = get(endpoint, path)
        assert (status, text) == (404, "there is /metrics\n")
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert get(endpoint, method=method)[0] == 501


def test_a_token_keeps_others_out(open_endpoint):
    endpoint = open_endpoint(token="a-secret-of-length")
    for given in ({}, {"Authorization": "Bearer a-secret-of-lengtx"}, {"Authorization": "Basic x"}):
        status, text, headers = get(endpoint, headers=given)
        assert status == 401
        assert headers["WWW-Authenticate"] == "Bearer"
        assert "kvkeep_" not in text
    status, text, _ = get(endpoint, headers={"Authorization": "Bearer a-secret-of-length"})
    assert status == 200
    assert "a-secret" not in text


def test_a_unix_socket_is_for_its_user_alone(open_endpoint, tmp_path):
    path = tmp_path / "metrics.sock"
    endpoint = open_endpoint(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert get(endpoint)[0] == 200
    with pytest.raises(OSError):  # somebody listens there
        open_endpoint(path)
    endpoint.close()
    assert not path.exists()


def test_a_socket_that_a_dead_process_left_is_replaced_and_nothing_else(open_endpoint, tmp_path):
    path = tmp_path / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert get(open_endpoint(path))[0] == 200
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(OSError):
        open_endpoint(other)
    assert other.read_text() == "mine"


def test_tls(open_endpoint, tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    endpoint = open_endpoint(tls=(cert, key), token="a-secret-of-length")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    headers = {"Authorization": "Bearer a-secret-of-length"}
    assert get(endpoint, headers=headers, tls=context)[0] == 200
    with pytest.raises((OSError, http.client.HTTPException)):
        get(endpoint, headers=headers)  # without TLS
    assert get(endpoint, headers=headers, tls=context)[0] == 200
    with pytest.raises(OSError):
        open_endpoint(tls=(tmp_path / "none.pem", key))


def test_a_silent_client_holds_up_nobody_and_ends_with_the_endpoint(open_endpoint):
    endpoint = open_endpoint()
    with socket.create_connection(endpoint.place, timeout=30) as silent:
        silent.sendall(b"GET /metr")
        for _ in range(3):
            assert get(endpoint)[0] == 200
        endpoint.close()
        assert silent.recv(1) == b""


def test_there_are_never_more_than_a_few_connections(open_endpoint, monkeypatch):
    endpoint = open_endpoint()
    held = [socket.create_connection(endpoint.place, timeout=30) for _ in range(MAX_CONNECTIONS)]
    try:
        with pytest.raises((OSError, http.client.HTTPException)):
            get(endpoint)
        monkeypatch.setattr("kvkeep.metrics.endpoint.CONNECTION_TIMEOUT_S", 0.0)
        assert get(endpoint)[0] == 200  # the oldest one had its time
        assert held[0].recv(1) == b""
    finally:
        for connection in held:
            connection.close()


def test_requests_that_are_none_are_refused(open_endpoint):
    endpoint = open_endpoint()
    many = b"".join(b"X-%d: 1\r\n" % number for number in range(1000))
    for data in (
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"G" * 100_000,
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + many,
    ):
        with socket.create_connection(endpoint.place, timeout=30) as connection:
            answer = b""
            with contextlib.suppress(OSError):  # it closes before all of it was sent
                connection.sendall(data + b"\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(1 << 20)
            assert b"kvkeep_lookup" not in answer
            assert b" 200 " not in answer
    assert get(endpoint)[0] == 200


def test_an_owner_of_a_gauge_that_fails_is_an_error_to_the_scraper_alone(open_endpoint):
    def broken() -> bytes:
        raise RuntimeError("a gauge's owner failed")

    endpoint = open_endpoint(exposition=broken)
    status, text, _ = get(endpoint)
    assert status == 500
    assert "RuntimeError" not in text
    assert get(endpoint)[0] == 500


def test_a_connection_that_cannot_be_taken_in_ends_nothing(open_endpoint, monkeypatch):
    accept = socket.socket.accept
    errors = [OSError(errno.EMFILE, "too many open files"), ConnectionAbortedError("gone")]

    def flaky(listener: socket.socket):
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr("kvkeep.metrics.endpoint.ERROR_PAUSE_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", flaky)
    assert get(open_endpoint())[0] == 200
    assert errors == []


def test_ranks_have_places_of_their_own():
    assert place_of_rank(("127.0.0.1", 9440), 0, 1) == ("127.0.0.1", 9440)
    assert place_of_rank(("127.0.0.1", 9440), 3, 4) == ("127.0.0.1", 9443)
    assert place_of_rank(("127.0.0.1", 0), 3, 4) == ("127.0.0.1", 0)
    assert place_of_rank(Path("/run/m.sock"), 0, 1) == Path("/run/m.sock")
    assert place_of_rank(Path("/run/m.sock"), 1, 2) == Path("/run/m.sock.1")
    with pytest.raises(ValueError, match="65535"):
        place_of_rank(("127.0.0.1", 65535), 1, 2)


def test_closing_with_scrapes_under_way_leaves_no_thread(open_endpoint):
    endpoint = open_endpoint(exposition=lambda: (time.sleep(0.2), b"")[1])
    held = [socket.create_connection(endpoint.place, timeout=30) for _ in range(3)]
    for connection in held:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    endpoint.close()  # the fixture of tests/conftest.py looks for threads
    for connection in held:
        connection.close()
