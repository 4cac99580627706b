"""Where samples come from; here, a metrics endpoint.

One thread. Each question has a deadline. A worker that does not answer is left out of this round
and asked again in the next one.

Samples of every engine of this user on this machine, through the lookup sockets. One thread.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvkeep.errors import ConfigError, LookupServiceError
from kvkeep.lookup.sockets import check_private, is_listened_on
from kvkeep.top.rates import Sample, series_of_snapshot, series_of_text

#: Longest page of a metrics endpoint that is read.
_MAX_PAGE_BYTES = 16 << 20

if TYPE_CHECKING:
    from kvkeep.lookup.client import LookupClient


class Source(Protocol):
    """Something that has samples."""

    def poll(self) -> list[Sample]:
        """One sample of each worker that answers."""

    def close(self) -> None:
        """End all connections; a second call does nothing."""


class PageSource:
    """One worker, through its metrics endpoint."""

    def __init__(self, url: str, *, token: str | None, timeout_s: float) -> None:
        """Nothing is asked yet.

        Args:
            url: ``http://`` or ``https://``, or ``unix:/path`` for a Unix socket.
            token: sent as a bearer token; None for none.
            timeout_s: deadline of each question.

        Raises:
            ConfigError: it is no such URL.
        """
        if not url.startswith(("http://", "https://", "unix:/")):
            raise ConfigError(
                f"--url {url!r}: write http://127.0.0.1:PORT/metrics, or unix:/path for a socket"
            )
        self._url = url
        self._timeout_s = timeout_s
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        #: Why the last question was not answered; empty if it was.
        self.problem = ""

    def poll(self) -> list[Sample]:
        """See :meth:`Source.poll`."""
        try:
            text = self._read().decode()
            series = series_of_text(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.problem = _reason(error)
            return []
        if not series:
            self.problem = "the page has no metrics of kvkeep"
            return []
        self.problem = ""
        return [Sample(self._url, self._url, 0, time.monotonic(), series)]

    def close(self) -> None:
        """See :meth:`Source.close`. Nothing is kept open."""

    def _read(self) -> bytes:
        if self._url.startswith("unix:"):
            connection = _UnixConnection(self._url.removeprefix("unix:"), self._timeout_s)
            with contextlib.closing(connection):
                connection.request("GET", "/metrics", headers=self._headers)
                answer = connection.getresponse()
                if answer.status != http.client.OK:
                    raise OSError(f"{answer.status} {answer.reason}")
                return answer.read(_MAX_PAGE_BYTES)
        request = urllib.request.Request(self._url, headers=self._headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            return bytes(answer.read(_MAX_PAGE_BYTES))


def _reason(error: Exception) -> str:
    """Why a page could not be read, without the client library's own frame around it."""
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        return str(error.reason)
    return str(error) or type(error).__name__


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the path."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class SocketSource:
    """Every engine of this user on this machine, through the sockets of its workers."""

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        """Nothing is asked yet.

        Args:
            directory: of the sockets.
            timeout_s: deadline of each question.
        """
        self._directory = directory
        self._timeout_s = timeout_s
        self._clients: dict[Path, LookupClient] = {}

    def poll(self) -> list[Sample]:
        """See :meth:`Source.poll`. Finds engines that were started meanwhile."""
        samples = []
        for path in self._paths():
            client = self._clients.get(path)
            if client is None:
                if not is_listened_on(path):  # a killed worker left it
                    continue
                from kvkeep.lookup.client import LookupClient

                client = LookupClient([path], timeout_s=self._timeout_s)
                self._clients[path] = client
            try:
                [numbers] = client.numbers()
            except LookupServiceError:
                self._forget(path)
                continue
            name, _, rank = path.stem.rpartition("-")
            number = int(rank) if rank.isdecimal() else 0
            series = series_of_snapshot(numbers)
            samples.append(Sample(path.stem, name, number, time.monotonic(), series))
        return samples

    def close(self) -> None:
        """See :meth:`Source.close`."""
        for path in list(self._clients):
            self._forget(path)

    def _paths(self) -> list[Path]:
        try:
            check_private(self._directory)
        except LookupServiceError:
            return []
        return sorted(self._directory.glob("*.sock"))

    def _forget(self, path: Path) -> None:
        client = self._clients.pop(path, None)
        if client is not None:
            client.close()
