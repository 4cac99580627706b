"""MetricsEndpoint: shows a worker's metrics over HTTP to whoever scrapes them.

One thread accepts; each connection has a thread of its own and a deadline, and there are never more
than a few. It answers ``GET /metrics`` and nothing else. Opened and closed by the thread that sets
a worker up; callable from any thread.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path

#: The text format that :func:`prometheus_client.generate_latest` writes.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Connections at once. A further one takes the place of one that is too old, or is refused.
MAX_CONNECTIONS = 8
#: How long one call on a connection, and one connection, may take.
CALL_TIMEOUT_S, CONNECTION_TIMEOUT_S = 5.0, 10.0
#: How long no connection is taken in after one could not be.
ERROR_PAUSE_S = 1.0
#: How long :meth:`MetricsEndpoint.close` waits for a thread.
CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)

#: An address and a port, or the path of a Unix socket.
Place = tuple[str, int] | Path


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Where and to whom metrics are shown.

    Attributes:
        place: where to listen. Port 0 lets the system choose.
        token: what the client must send as its bearer token; None asks for none.
        tls: certificate chain and private key, PEM files; None speaks plain HTTP.
    """

    place: Place
    token: str | None = None
    tls: tuple[Path, Path] | None = None


def place_of_rank(place: Place, rank: int, num_ranks: int) -> Place:
    """Where one of several ranks listens: at the port plus its rank, or at the path.RANK.

    Raises:
        ValueError: there is no such port.
    """
    if num_ranks == 1:
        return place
    if isinstance(place, Path):
        return place.with_name(f"{place.name}.{rank}")
    host, port = place
    if port + rank > 65535:
        raise ValueError(f"rank {rank} has no port: {port} + {rank} is above 65535")
    return (host, port + rank) if port else place


class MetricsEndpoint:
    """Serves ``/metrics`` until it is closed."""

    def __init__(self, options: EndpointOptions, exposition: Callable[[], bytes]) -> None:
        """Listen at once.

        Args:
            options: where, and to whom.
            exposition: the answer, in the Prometheus text format.

        Raises:
            OSError: the address is taken or not this machine's, the path cannot be used, or the
                certificate cannot be read (ssl.SSLError is one, too).
        """
        self.token = options.token
        self.exposition = exposition
        self._tls = _tls_context(options.tls) if options.tls is not None else None
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, tuple[float, threading.Thread]] = {}  # by _lock
        self._closing = threading.Event()
        self._path = options.place if isinstance(options.place, Path) else None
        self._socket = _listen(options.place)
        self._thread = threading.Thread(target=self._accept, name="kvkeep-metrics", daemon=True)
        self._thread.start()

    @property
    def place(self) -> Place:
        """Where it listens, with the port that the system chose."""
        if self._path is not None:
            return self._path
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Stop listening and end every connection; a second call does nothing."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            connections = list(self._connections.items())
        _end(self._socket)  # wakes accept()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._socket.close()
        for connection, (_, thread) in connections:
            _end(connection)
            thread.join(CLOSE_TIMEOUT_S)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _accept(self) -> None:
        """The thread: hand each connection to a thread of its own."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # too many files are open, say
                if not self._closing.is_set():
                    _log.warning("the metrics endpoint could not accept: %s", error)
                if self._closing.wait(ERROR_PAUSE_S):
                    return
                continue
            connection.settimeout(CALL_TIMEOUT_S)
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="kvkeep-metrics-scrape", daemon=True
            )
            if self._take_in(connection, thread):
                thread.start()
            else:
                connection.close()

    def _take_in(self, connection: socket.socket, thread: threading.Thread) -> bool:
        """Note a connection. False if there are too many; then the oldest may be over its time."""
        now = time.monotonic()
        with self._lock:
            if self._closing.is_set():
                return False
            if len(self._connections) >= MAX_CONNECTIONS:
                oldest, (started, _) = min(self._connections.items(), key=lambda item: item[1][0])
                if now - started < CONNECTION_TIMEOUT_S:
                    return False
                _end(oldest)  # its thread notices and lets it go
                self._connections.pop(oldest)
            self._connections[connection] = (now, thread)
            return True

    def _serve(self, connection: socket.socket) -> None:
        """The thread of one connection: read one request, answer it."""
        served = connection
        try:
            if self._tls is not None:
                served = self._tls.wrap_socket(connection, server_side=True)
            _Handler(served, self)
        except OSError as error:  # the client went away, was too slow, or speaks no TLS
            _log.debug("a scrape failed: %s", error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            served.close()
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server_version = "kvkeep"
    sys_version = ""

    def __init__(self, connection: socket.socket, endpoint: MetricsEndpoint) -> None:
        self._endpoint = endpoint
        super().__init__(connection, ("", 0), None)  # type: ignore[arg-type]  # only logs use it

    def do_GET(self) -> None:
        """Answer ``/metrics``."""
        token = self._endpoint.token
        if token is not None:
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                self._answer(HTTPStatus.UNAUTHORIZED, b"a bearer token is needed\n")
                return
        if self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"there is /metrics\n")
            return
        try:
            body = self._endpoint.exposition()
        except Exception:  # noqa: BLE001  the top of this task: a gauge's owner failed
            _log.warning("the metrics could not be read", exc_info=True)
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the metrics could not be read\n")
            return
        self._answer(HTTPStatus.OK, body)

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged."""


def _tls_context(files: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(*files)
    return context


def _listen(place: Place) -> socket.socket:
    """A listening socket; that of a path is for this user alone."""
    if isinstance(place, Path):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: str | tuple[str, int] = str(place)
    else:
        listener = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = place
    try:
        if isinstance(place, Path):
            os.fchmod(listener.fileno(), 0o600)  # before bind: the file has this mode from then on
            _remove_dead(place)
        listener.bind(address)
        listener.listen(MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path) -> None:
    """Remove a socket on which nobody listens any more; leave everything else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CALL_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
