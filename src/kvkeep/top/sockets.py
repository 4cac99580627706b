"""Samples of every engine of this user on this machine, through the lookup sockets. One thread."""

from __future__ import annotations

import time
from pathlib import Path

from kvkeep.errors import LookupServiceError
from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.paths import check_private, is_listened_on
from kvkeep.top.samples import Sample, series_of_snapshot


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
