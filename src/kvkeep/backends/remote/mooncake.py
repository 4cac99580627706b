"""MooncakeConnector: Mooncake Store, the memory of many machines as one pool.

One object per chunk, header and payload in one transfer, straight from and into the CPU tier's
memory, which is registered once. What lies elsewhere (what a codec made, a chunk that is not full)
goes through the client's own buffer.

The library's calls cannot be ended: with a master that is frozen they take 30 s, with a frozen
machine of the pool about a minute. They run as :class:`DetachedCalls`; a late one keeps the memory
that it writes into. One that sends a chunk may still read its memory: what it then sends does not
verify. They spin while they wait, so half of the cores move payloads at once, and no more.

An object that was read or asked for has a lease of some seconds, under which the master neither
evicts nor removes it. That is for readers that trust what they read. kvkeep's readers verify, and a
chunk that is removed has to be gone, so it is removed in spite of leases; and a place is compared
after it was read.

MooncakeClient: the library's client, opened when it is needed, and what its answers mean.

Every method blocks, for how long nobody knows: they are for threads of DetachedCalls. Opening and
closing a client hold the interpreter's lock as well, for minutes if the master is frozen, so both
begin with a look whether it runs.

Memory that Mooncake's client reads and writes by address: headers, and views of the pool.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from mooncake.store import MooncakeDistributedStore

from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    TIER,
    ConnectorOptions,
    Refusal,
    RemoteConnector,
    Value,
    ValueSink,
)
from kvkeep.backends.remote.calls import ConcurrencyLimit, DetachedCalls
from kvkeep.backends.remote.mooncake_url import MooncakeOptions
from kvkeep.codec.frame import Buffer
from kvkeep.config.base import RemoteURL
from kvkeep.errors import BackendError, BackendTimeoutError, ConfigError


def address_of(view: Buffer) -> int:
    """Where the bytes of a view begin in this process."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class HeaderSlots:
    """Room for headers, registered once; a call takes as many as it has values."""

    def __init__(self, count: int) -> None:
        """Make room for ``count`` headers."""
        self.memory = np.zeros((count, HEADER_BYTES), np.uint8)
        self._lock = threading.Lock()
        self._free = list(range(count))  # guarded by _lock

    def take(self, count: int) -> Slots:
        """Room for so many headers.

        Raises:
            ConnectionError: calls that do not end have all of it.
        """
        with self._lock:
            if len(self._free) < count:
                raise ConnectionError("calls that do not end hold all memory for headers")
            taken = [self._free.pop() for _ in range(count)]
        return Slots(self, taken)

    def give_back(self, taken: Sequence[int]) -> None:
        """Take slots back."""
        with self._lock:
            self._free += taken


class Slots:
    """Slots of one call. Leaving the ``with`` block gives them back, unless they are kept."""

    def __init__(self, owner: HeaderSlots, taken: Sequence[int]) -> None:
        """Own these slots."""
        self._owner = owner
        self._taken = taken
        self._is_kept = False

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_kept:
            self.give_back()

    def keep(self) -> None:
        """From now on somebody else calls :meth:`give_back`, once."""
        self._is_kept = True

    def give_back(self) -> None:
        """Nobody reads or writes them any more."""
        self._owner.give_back(self._taken)

    def address(self, index: int) -> int:
        """Of the header at this position."""
        return address_of(self._owner.memory[self._taken[index]].data)

    def write(self, index: int, header: bytes) -> None:
        """Put a header there."""
        self._owner.memory[self._taken[index]] = np.frombuffer(header, np.uint8)

    def read(self, index: int) -> bytes:
        """The header that is there."""
        return bytes(self._owner.memory[self._taken[index]])


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


T = TypeVar("T")

#: Values of one call to the library.
_AT_ONCE = 8
#: Most bytes of the master's list of names.
_MAX_LIST_BYTES = 1 << 30
#: How long leaving the pool may take.
_CLOSE_TIMEOUT_S = 5.0


class MooncakeConnector(RemoteConnector):
    """Values as objects of a pool."""

    def __init__(self, url: RemoteURL, options: ConnectorOptions) -> None:
        """Use the pool of a URL; see :class:`MooncakeOptions`. Nothing is connected yet.

        Raises:
            ConfigError: the URL is wrong, or values shall be forgotten after a time.
        """
        if options.ttl_s is not None:
            raise ConfigError("mooncake:// has no time to live; its master evicts what is old")
        self.description = url.masked
        self._options = MooncakeOptions.of(url, options)
        self._max_value_bytes = options.max_value_bytes
        self._calls = DetachedCalls("kvkeep-mooncake", most_late=2 * options.connections)
        self._turns = ConcurrencyLimit(max(1, len(os.sched_getaffinity(0)) // 2))
        self._slots = HeaderSlots(4 * _AT_ONCE * options.connections)
        self._client = MooncakeClient(self._options, options.connect_timeout_s)
        self._client.register(self._slots.memory.data)
        self._pool = range(0)  # of addresses

    def register(self, pool: memoryview) -> None:
        """See the interface. The view is kept: the memory stays mapped while calls may use it."""
        self._client.register(pool)
        start = address_of(pool)
        self._pool = range(start, start + pool.nbytes)

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int]:
        """See the interface: which are there, then how large those are."""

        def ask(client: MooncakeDistributedStore) -> list[Place | None]:
            there = present(client, names)
            found = [name for name, is_there in zip(names, there, strict=True) if is_there]
            by_name = dict(zip(found, places(client, found), strict=True))
            return [by_name.get(name) for name in names]

        with _as_store_errors("lookup"):
            found = self._call(ask, time.monotonic() + timeout_s)
        return [0 if place is None else place.size_bytes for place in found]

    # -- put ---------------------------------------------------------------------------------

    def put(
        self, names: Sequence[str], values: Sequence[Value], timeout_s: float
    ) -> list[Refusal | None]:
        """See the interface. The library keeps what is there, so that is removed first."""
        deadline = time.monotonic() + timeout_s
        answers: list[Refusal | None] = [None] * len(names)
        with _as_store_errors("put"):
            for start in range(0, len(names), _AT_ONCE):
                some = range(start, min(start + _AT_ONCE, len(names)))
                self._call(partial(_remove_present, [names[i] for i in some]), deadline)
                wanted = [i for i in some if values[i].size_bytes > 0]  # an empty one is none
                direct = [i for i in wanted if self._is_registered(values[i])]
                for i, code in zip(
                    direct,
                    self._put_direct(
                        [names[i] for i in direct], [values[i] for i in direct], deadline
                    ),
                    strict=True,
                ):
                    answers[i] = was_put(code)
                for i in wanted:
                    if i not in direct:
                        code = self._call(partial(_put_copy, names[i], values[i]), deadline)
                        answers[i] = was_put(code)
        return answers

    def _put_direct(self, names: list[str], values: list[Value], deadline: float) -> list[int]:
        """Send headers and payloads from where they are."""
        if not names:
            return []
        with self._slots.take(len(names)) as slots:
            for index, value in enumerate(values):
                slots.write(index, value.header)
            addresses = [
                [slots.address(index), address_of(value.payload)]
                for index, value in enumerate(values)
            ]
            lengths = [[HEADER_BYTES, value.size_bytes - HEADER_BYTES] for value in values]

            def keep() -> list[Callable[[], None]]:
                slots.keep()
                return [slots.give_back]

            def send(client: MooncakeDistributedStore) -> list[int]:
                return list(client.batch_put_from_multi_buffers(names, addresses, lengths))

            return self._transfer(send, deadline, keep)

    # -- get ---------------------------------------------------------------------------------

    def get(self, names: Sequence[str], sinks: Sequence[ValueSink], timeout_s: float) -> None:
        """See the interface."""
        deadline = time.monotonic() + timeout_s
        with _as_store_errors("get"):
            failed = [
                self._get(
                    names[start : start + _AT_ONCE], sinks[start : start + _AT_ONCE], deadline
                )
                for start in range(0, len(names), _AT_ONCE)
            ]
            if names and sum(failed) == len(names):
                raise MooncakeError("no machine of the pool hands out its values")

    def _get(self, names: Sequence[str], sinks: Sequence[ValueSink], deadline: float) -> int:
        """Read a few values; how many of them their machine did not hand out."""
        found = self._call(lambda client: places(client, names), deadline)
        direct: list[tuple[int, Place, memoryview]] = []
        copied: list[tuple[int, Place]] = []
        for index, place in enumerate(found):
            if place is None or place.size_bytes == 0:
                continue
            if place.size_bytes > self._max_value_bytes:
                sinks[index].begin(b"", place.size_bytes)
                continue
            memory = sinks[index].expected(place.size_bytes - HEADER_BYTES)
            if memory and self._lies_in_pool(memory):
                direct.append((index, place, memory))
            else:
                copied.append((index, place))
        failed = self._read_direct(names, sinks, direct, deadline) if direct else 0
        for index, place in copied:
            data = self._call(partial(_read_copy, names[index], place), deadline)
            if data is None:
                failed += 1
            elif len(data):
                _hand_over(memoryview(data), sinks[index])
        return failed

    def _read_direct(
        self,
        names: Sequence[str],
        sinks: Sequence[ValueSink],
        wanted: Sequence[tuple[int, Place, memoryview]],
        deadline: float,
    ) -> int:
        """Read values whose payloads go where they belong; how many transfers failed."""
        some = [names[index] for index, _, _ in wanted]
        with self._slots.take(len(wanted)) as slots:
            addresses = [
                [slots.address(number), address_of(memory)]
                for number, (_, _, memory) in enumerate(wanted)
            ]
            lengths = [[HEADER_BYTES, len(memory)] for _, _, memory in wanted]

            def keep() -> list[Callable[[], None]]:
                slots.keep()
                return [slots.give_back, *[sinks[index].hold() for index, _, _ in wanted]]

            def read(client: MooncakeDistributedStore) -> tuple[list[int], list[Place | None]]:
                codes = client.batch_get_into_multi_buffers(some, addresses, lengths)
                return list(codes), places(client, some)

            codes, after = self._transfer(read, deadline, keep)
            failed = 0
            for number, (index, place, memory) in enumerate(wanted):
                is_whole = was_read(codes[number], place.size_bytes)
                failed += is_whole is None
                if is_whole and after[number] == place:
                    _finish(sinks[index], slots.read(number), memory)
        return failed

    # -- the rest ----------------------------------------------------------------------------

    def remove(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """See the interface."""
        with _as_store_errors("remove"):
            deadline = time.monotonic() + timeout_s
            return self._call(lambda client: remove(client, names), deadline)

    def names(self, prefix: str, timeout_s: float) -> Iterator[str]:
        """See the interface. The client cannot list; the master's HTTP service can."""
        address = f"http://{self._options.admin}/get_all_keys"
        with _as_store_errors("list"):
            try:
                with urllib.request.urlopen(address, timeout=timeout_s) as answer:
                    lines = answer.read(_MAX_LIST_BYTES).decode("utf-8", "replace").splitlines()
            except http.client.HTTPException as error:
                raise OSError(f"{address}: {error}") from error
        yield from (line for line in lines if line.startswith(prefix))

    def ping(self, timeout_s: float) -> None:
        """See the interface. Asks the master for a value that nobody has."""
        with _as_store_errors("ping"):
            self._call(
                lambda client: present(client, ["kvkeep-ping"]),
                time.monotonic() + timeout_s,
            )

    def close(self) -> None:
        """See the interface. While a call does not end, the client stays as it is."""
        if self._calls.num_late == 0:
            with contextlib.suppress(OSError):
                self._calls.call(self._client.close, time.monotonic() + _CLOSE_TIMEOUT_S)

    def _call(
        self,
        run: Callable[[MooncakeDistributedStore], T],
        deadline: float,
        keep: Callable[[], Sequence[Callable[[], None]]] = tuple,
    ) -> T:
        return self._calls.call(lambda: run(self._client.ready(deadline)), deadline, keep)

    def _transfer(
        self,
        run: Callable[[MooncakeDistributedStore], T],
        deadline: float,
        keep: Callable[[], Sequence[Callable[[], None]]],
    ) -> T:
        """A call that moves payloads, when it is its turn."""
        with self._turns.turn(deadline):
            return self._call(run, deadline, keep)

    def _is_registered(self, value: Value) -> bool:
        return len(value.header) == HEADER_BYTES and self._lies_in_pool(value.payload)

    def _lies_in_pool(self, view: Buffer) -> bool:
        size_bytes = memoryview(view).nbytes
        start = address_of(view) if size_bytes else 0
        return size_bytes > 0 and start in self._pool and start + size_bytes - 1 in self._pool


def _remove_present(names: list[str], client: MooncakeDistributedStore) -> None:
    """Remove those of these values that there are."""
    there = present(client, names)
    remove(client, [name for name, found in zip(names, there, strict=True) if found])


def _put_copy(name: str, value: Value, client: MooncakeDistributedStore) -> int:
    """Put a value through the client's own buffer."""
    parts = [part for part in (value.header, value.payload) if memoryview(part).nbytes]
    return int(client.put_parts(name, *parts))


def _read_copy(name: str, place: Place, client: MooncakeDistributedStore) -> bytes | None:
    """The value, through the client's own buffer; empty if it is gone, None if it cannot be had."""
    handle = client.get_buffer(name)
    after = places(client, [name])[0]
    if after != place:
        return b""
    return bytes(handle) if handle is not None and handle.size() == place.size_bytes else None


def _hand_over(data: memoryview, sink: ValueSink) -> None:
    """Give a whole value to its sink."""
    target = sink.begin(data[:HEADER_BYTES], len(data))
    if target is not None:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data[HEADER_BYTES:], np.uint8))
        sink.finish()


def _finish(sink: ValueSink, header: bytes, memory: memoryview) -> None:
    """A value is in the memory that its sink expected it in."""
    target = sink.begin(header, HEADER_BYTES + len(memory))
    if target is None:
        return
    if target is not memory:  # by its header it is something else of the same size
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(memory, np.uint8))
    sink.finish()


@contextlib.contextmanager
def _as_store_errors(operation: str) -> Iterator[None]:
    """Errors of the pool, of the network and of the deadline as errors of the store."""
    try:
        yield
    except TimeoutError as error:
        raise BackendTimeoutError(str(error), backend=TIER, operation=operation) from error
    except OSError as error:
        raise BackendError(str(error), backend=TIER, operation=operation) from error
