"""MooncakeClient: the library's client, opened when it is needed, and what its answers mean.

Every method blocks, for how long nobody knows: they are for threads of UnendingCalls. Opening and
closing a client hold the interpreter's lock as well, for minutes if the master is frozen, so both
begin with a look whether it runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake.store import MooncakeDistributedStore

from kvkeep.backends.remote.base import Refusal
from kvkeep.backends.remote.mooncake_memory import address_of
from kvkeep.backends.remote.mooncake_url import MooncakeOptions

#: Answers of the library (its ``ErrorCode``) that mean something to us.
_NO_SPACE, _NOT_FOUND, _TRANSFER_FAILED = -200, -704, -800
#: Not there any more, not complete, or evicted while it was read.
_MISSES = frozenset({_NOT_FOUND, -703, -707})
_REFUSALS = {_NO_SPACE: Refusal.FULL, -600: Refusal.TOO_LARGE}

#: Clients whose master did not run when they were closed. Their end would wait for it, so it is put
#: off to the end of the process.
_LEFT_OPEN: list[MooncakeDistributedStore] = []


class MooncakeError(ConnectionError):
    """The pool as a whole failed; the message has the library's number."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value is: equal before and after it was read, if it was not moved meanwhile."""

    size_bytes: int
    endpoint: str
    address: int


class MooncakeClient:
    """One client. Callable from any thread."""

    def __init__(self, options: MooncakeOptions, connect_timeout_s: float) -> None:
        """Nothing is connected yet."""
        self._options = options
        self._connect_timeout_s = connect_timeout_s
        self._to_register: list[memoryview] = []
        self._opening = threading.Lock()
        self._client: MooncakeDistributedStore | None = None  # guarded by _opening
        self._is_closed = False  # guarded by _opening

    def register(self, memory: memoryview) -> None:
        """Transfers will use this memory; called before anything else. It is kept mapped."""
        self._to_register.append(memory.cast("B"))

    def ready(self, deadline: float) -> MooncakeDistributedStore:
        """The open client, opened now if it is not.

        Raises:
            TimeoutError: another thread has been opening it until the deadline.
            OSError: the pool cannot be joined.
        """
        if not self._opening.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("joining the pool takes too long")
        try:
            if self._is_closed:
                raise MooncakeError("the connector is closed")
            if self._client is None:
                self._client = self._open()
            return self._client
        finally:
            self._opening.release()

    def _open(self) -> MooncakeDistributedStore:
        options = self._options
        hostname = options.reach_master(self._connect_timeout_s)
        client = MooncakeDistributedStore()
        code = client.setup(
            hostname,
            options.metadata_server,
            options.lend_bytes,
            options.buffer_bytes,
            options.protocol,
            options.devices,
            options.master,
        )
        for view in self._to_register:
            code = code or client.register_buffer(address_of(view), len(view))
        if code:
            raise MooncakeError(f"the pool cannot be joined: error {code}")
        return client

    def close(self) -> None:
        """Leave the pool, if its master runs. Never while a call is running."""
        with self._opening:
            self._is_closed = True
            client, self._client = self._client, None
        if client is None:
            return
        try:
            self._options.reach_master(self._connect_timeout_s)
        except OSError:
            _LEFT_OPEN.append(client)
        else:
            client.close()


def present(client: MooncakeDistributedStore, names: Sequence[str]) -> list[bool]:
    """Which names have a value.

    Raises:
        MooncakeError: the master does not answer.
    """
    codes = client.batch_is_exist(list(names)) if names else []
    failed = [code for code in codes if code < 0 and code not in _MISSES]
    if failed or len(codes) != len(names):
        raise MooncakeError(f"the master does not answer: error {failed[:1]}")
    return [code == 1 for code in codes]


def places(client: MooncakeDistributedStore, names: Sequence[str]) -> list[Place | None]:
    """Where these values are; the master keeps them there for its readers for some seconds.

    Raises:
        MooncakeError: the master does not answer.
    """
    found = client.batch_get_replica_desc(list(names)) if names else {}
    if not found and names:
        present(client, names[:1])  # an empty answer may mean that there was none
    return [_place(found.get(name)) for name in names]


def _place(replicas: Sequence[object] | None) -> Place | None:
    for replica in replicas or ():
        if replica.is_memory_replica():  # type: ignore[attr-defined]
            there = replica.get_memory_descriptor().buffer_descriptor  # type: ignore[attr-defined]
            return Place(there.size, str(there.transport_endpoint), there.buffer_address)
        if replica.is_disk_replica():  # type: ignore[attr-defined]
            disk = replica.get_disk_descriptor()  # type: ignore[attr-defined]
            return Place(disk.object_size, str(disk.file_path), 0)
    return None


def remove(client: MooncakeDistributedStore, names: Sequence[str]) -> list[bool]:
    """Remove values in spite of leases; which of them there were.

    Raises:
        MooncakeError: the master does not answer.
    """
    codes = client.batch_remove(list(names), True) if names else []
    failed = [code for code in codes if code < 0 and code not in _MISSES]
    if failed or len(codes) != len(names):
        raise MooncakeError(f"values cannot be removed: error {failed[:1]}")
    return [code == 0 for code in codes]


def was_read(code: int, size_bytes: int) -> bool | None:
    """What the library's answer to a read means: whole, a miss, or (None) a failed transfer.

    Raises:
        MooncakeError: the pool failed.
    """
    if code == size_bytes:
        return True
    if code >= 0 or code in _MISSES:
        return False
    if code == _TRANSFER_FAILED:
        return None
    raise MooncakeError(f"error {code}")


def was_put(code: int) -> Refusal | None:
    """What the library's answer to a put means.

    Raises:
        MooncakeError: the pool failed.
    """
    if code < 0 and code not in _REFUSALS:
        raise MooncakeError(f"error {code}")
    return _REFUSALS.get(code)
