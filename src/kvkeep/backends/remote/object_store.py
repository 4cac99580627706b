"""ObjectStoreConnector: S3 and what is compatible with it, and what else ``obstore`` speaks.

One object per chunk. Requests are awaited on a thread of their own (``async_calls.py``), so that a
deadline ends them. A download lies in the client's memory until it is whole; then it is copied into
the chunk's, so no request ever writes there. An upload reads the chunk's memory as it is; one that
is cancelled has let go of it before the call ends.

What a URL of an object store means to ``obstore``. Opens the client; sends nothing yet.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import obstore
from obstore.exceptions import BaseError, GenericError, PermissionDeniedError
from obstore.store import ObjectStore, from_url

from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    TIER,
    ConnectorOptions,
    Refusal,
    RemoteConnector,
    Value,
    ValueSink,
)
from kvkeep.backends.remote.calls import AsyncCalls
from kvkeep.backends.slow_tier import pieces
from kvkeep.config.base import RemoteURL
from kvkeep.errors import BackendError, BackendTimeoutError, ConfigError

#: Schemes whose URL may hold the keys in place of user and password.
_S3 = ("s3", "s3a")
#: Options of the URL that are the HTTP client's, not the store's.
_CLIENT_OPTIONS = frozenset(
    {"allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes", "pool_idle_timeout"}
)
#: The option that names a file with certificates in PEM form to trust.
_CA_FILE = "ca_file"
#: No request runs longer, whatever a deadline says.
_LONGEST_REQUEST_S = 600


def open_object_store(url: RemoteURL, options: ConnectorOptions) -> ObjectStore:
    """The client for a URL like ``s3://bucket/prefix?endpoint=...&region=...``.

    What the URL does not say comes from the environment, as with every client of the store
    (``AWS_ACCESS_KEY_ID``, ``AWS_REGION``, ``AZURE_STORAGE_...``, ``GOOGLE_...``), and from the
    machine's own role.

    Raises:
        ConfigError: the URL has an option that the store does not know, or lacks one. The message
            shows no secret.
    """
    config, client = _split(url)
    if url.scheme in _S3:
        # the frame has its own checksum, and signing a payload means hashing it once more
        config.setdefault("unsigned_payload", "true")
    try:
        # its stubs know one form for each kind of store; which one this is, the URL says
        make = cast("Callable[..., ObjectStore]", from_url)
        return make(
            f"{url.scheme}://{url.hosts}{url.path.rstrip('/')}",
            config=config or None,
            client_options={
                **client,
                "connect_timeout": timedelta(seconds=options.connect_timeout_s),
                "timeout": timedelta(seconds=_LONGEST_REQUEST_S),
            },
            # RemoteBackend retries, with the deadline in mind
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(f"{url.masked}: {first_line(error)}") from None


def _split(url: RemoteURL) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the store, and of its HTTP client."""
    config: dict[str, Any] = dict(url.options)
    client: dict[str, Any] = {name: config.pop(name) for name in _CLIENT_OPTIONS & config.keys()}
    if url.user or url.password:
        if url.scheme not in _S3:
            raise ConfigError(f"{url.scheme}:// takes no user and password; give them as options")
        config |= {"access_key_id": url.user or "", "secret_access_key": url.password or ""}
    for name, value in config.items():
        if (
            "@" in str(value).partition("://")[2].partition("/")[0]
        ):  # the client's errors would show it
            raise ConfigError(f"{name} takes no user and password; give them as options")
    if _speaks_plainly(url.scheme, config):
        client.setdefault("allow_http", "true")
    client = {name: _as_bool(value) for name, value in client.items()}
    if (ca_file := config.pop(_CA_FILE, None)) is not None:
        try:
            client["root_certificate"] = Path(ca_file).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the certificates {ca_file}: {error}") from None
    return config, client


def _speaks_plainly(scheme: str, config: Mapping[str, Any]) -> bool:
    """The user has named an endpoint without TLS."""
    return scheme == "http" or str(config.get("endpoint", "")).startswith("http://")


def _as_bool(value: str) -> str | bool:
    return {"true": True, "false": False}.get(value.lower(), value)


def first_line(error: BaseException) -> str:
    """An error of the client in one line, without the dump that follows."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


T = TypeVar("T")

#: Requests of one call that are under way at once: small ones, and those with values. Of values
#: one is taken in while the next one travels.
_SMALL_WINDOW, _VALUE_WINDOW = 64, 2
#: Names of one request that lists.
_LIST_AT_ONCE = 1000
#: How long a cancelled upload may take to let go of memory. It takes milliseconds.
_LET_GO_S = 2.0
#: What stores say when they do not take a value, and what it means.
_REFUSALS = {
    "EntityTooLarge": Refusal.TOO_LARGE,
    "413 Payload Too Large": Refusal.TOO_LARGE,
    "QuotaExceeded": Refusal.FULL,
    "StorageFull": Refusal.FULL,
    "507 Insufficient Storage": Refusal.FULL,
}


class _Bad(Enum):
    """Why an object that is there is not handed over."""

    TOO_LARGE = "length"
    UNREADABLE = "truncated"


class ObjectStoreConnector(RemoteConnector):
    """Values as objects of a bucket."""

    sizes_at_once = False

    def __init__(self, url: RemoteURL, options: ConnectorOptions) -> None:
        """Use the bucket of a URL; see :func:`open_object_store`. Nothing is sent yet.

        Raises:
            ConfigError: the URL is wrong, or values shall be forgotten after a time, which buckets
                do by rules of their own.
        """
        if options.ttl_s is not None:
            raise ConfigError(
                f"{url.scheme}:// has no time to live: give the bucket a lifecycle rule instead"
            )
        self.description = url.masked
        self._max_value_bytes = options.max_value_bytes
        self._store = open_object_store(url, options)
        self._calls = AsyncCalls("kvkeep-object-store")

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int]:
        """See the interface. One small request per name, many at a time."""
        deadline = time.monotonic() + timeout_s
        sizes = [0] * len(names)
        calls = [partial(self._size, name) for name in names]
        with _as_store_errors("lookup"):
            for index, size in self._results(calls, deadline, _SMALL_WINDOW):
                sizes[index] = size
        return sizes

    async def _size(self, name: str) -> int:
        try:
            return (await obstore.head_async(self._store, name))["size"]
        except FileNotFoundError:
            return 0

    def put(
        self, names: Sequence[str], values: Sequence[Value], timeout_s: float
    ) -> list[Refusal | None]:
        """See the interface."""
        deadline = time.monotonic() + timeout_s
        answers: list[Refusal | None] = [None] * len(names)
        let_go = _LetGo()
        calls = [
            partial(self._put, name, [value.header, let_go.watch(memoryview(value.payload))])
            for name, value in zip(names, values, strict=True)
        ]
        try:
            with _as_store_errors("put"):
                for index, answer in self._results(calls, deadline, _VALUE_WINDOW):
                    answers[index] = answer
        finally:
            calls.clear()
            let_go.wait()
        return answers

    async def _put(self, name: str, parts: list[bytes | memoryview]) -> Refusal | None:
        """Send one object; ``parts`` is emptied, so that only the request holds memory then."""
        held, parts[:] = iter(list(parts)), []
        try:
            await obstore.put_async(self._store, name, held, use_multipart=False)
        except PermissionDeniedError:
            return Refusal.READ_ONLY
        except GenericError as error:
            text = str(error)
            for said, refusal in _REFUSALS.items():
                if said in text:
                    return refusal
            raise
        return None

    def get(self, names: Sequence[str], sinks: Sequence[ValueSink], timeout_s: float) -> None:
        """See the interface."""
        deadline = time.monotonic() + timeout_s
        calls = [partial(self._get, name) for name in names]
        with _as_store_errors("get"):
            for index, data in self._results(calls, deadline, _VALUE_WINDOW):
                if data is _Bad.TOO_LARGE:
                    sinks[index].begin(b"", self._max_value_bytes + 1)
                elif data is _Bad.UNREADABLE:
                    sinks[index].fail(data.value)
                elif data is not None:
                    _hand_over(memoryview(data), sinks[index])

    async def _get(self, name: str) -> obstore.Bytes | _Bad | None:
        """The whole object, what is wrong with it, or None: there is none.

        An answer that breaks off is asked for again: it may have been the connection. If it breaks
        off a second time while the store answers other questions, it is the object.
        """
        for _ in range(2):
            try:
                answer = await obstore.get_async(self._store, name)
            except FileNotFoundError:
                return None
            if answer.meta["size"] > self._max_value_bytes:
                return _Bad.TOO_LARGE  # the answer is dropped here, and with it its connection
            with contextlib.suppress(GenericError):
                return await answer.bytes_async()
        return _Bad.UNREADABLE if await self._size(name) else None

    def remove(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """See the interface. Stores do not say whether there was one, so that is asked first."""
        deadline = time.monotonic() + timeout_s
        there = [True] * len(names)
        with _as_store_errors("remove"):
            calls = [partial(self._is_there, name) for name in names]
            for index, is_there in self._results(calls, deadline, _SMALL_WINDOW):
                there[index] = is_there
            found = [name for name, is_there in zip(names, there, strict=True) if is_there]
            for _ in self._results([partial(self._remove, found)] if found else [], deadline, 1):
                pass
        return there

    async def _is_there(self, name: str) -> bool:
        try:
            await obstore.head_async(self._store, name)
        except FileNotFoundError:
            return False
        return True

    async def _remove(self, names: list[str]) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody else was quicker
            await obstore.delete_async(self._store, names)

    def names(self, prefix: str, timeout_s: float) -> Iterator[str]:
        """See the interface."""
        folder = prefix.rpartition("/")[0]
        listing = obstore.list(self._store, folder or None, chunk_size=_LIST_AT_ONCE)

        async def next_page() -> list[str]:
            try:
                page = await listing.__anext__()
            except StopAsyncIteration:
                return []
            return [str(entry["path"]) for entry in page]

        with _as_store_errors("list"):
            while page := self._one(next_page, timeout_s):
                yield from (name for name in page if name.startswith(prefix))

    def ping(self, timeout_s: float) -> None:
        """See the interface. Asks for an object that nobody has."""
        with _as_store_errors("ping"):
            self._one(partial(self._is_there, "kvkeep-ping"), timeout_s)

    def close(self) -> None:
        """See the interface."""
        self._calls.close()

    def _one(self, call: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """The result of one call."""
        return next(self._results([call], time.monotonic() + timeout_s, 1))[1]

    def _results(
        self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]], deadline: float, window: int
    ) -> Iterator[tuple[int, T]]:
        """Results with their positions, as they come."""
        with contextlib.closing(self._calls.each(calls, deadline, window)) as ended:
            for index, future in ended:
                yield index, future.result()


class _LetGo:
    """Knows whether views of memory are still held by anybody."""

    def __init__(self) -> None:
        self._watched: list[weakref.ref[memoryview]] = []
        self._one_went = threading.Condition()

    def watch(self, view: memoryview) -> memoryview:
        """Watch a view that nobody else holds."""
        self._watched.append(weakref.ref(view, self._went))
        return view

    def _went(self, _: weakref.ref[memoryview]) -> None:
        with self._one_went:
            self._one_went.notify_all()

    def wait(self) -> None:
        """Wait until no view is held, or for ``_LET_GO_S``."""
        with self._one_went:
            self._one_went.wait_for(
                lambda: all(watched() is None for watched in self._watched), _LET_GO_S
            )


def _hand_over(data: memoryview, sink: ValueSink) -> None:
    """Give a whole value to its sink."""
    target = sink.begin(data[:HEADER_BYTES], len(data))
    if target is None:
        return
    source = np.frombuffer(data, np.uint8)[HEADER_BYTES:]
    into = np.frombuffer(target, np.uint8)
    for start, piece in pieces(target):
        end = start + len(piece)
        np.copyto(into[start:end], source[start:end])
        sink.filled(end)
    sink.finish()


@contextlib.contextmanager
def _as_store_errors(operation: str) -> Iterator[None]:
    """Errors of the client, of the network and of the deadline as errors of the store."""
    try:
        yield
    except TimeoutError as error:
        raise BackendTimeoutError(str(error), backend=TIER, operation=operation) from error
    except (BaseError, OSError) as error:
        raise BackendError(first_line(error), backend=TIER, operation=operation) from error
