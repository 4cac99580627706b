"""What a connector to a remote store promises. Start here to write one.

A connector speaks to one store through a well-kept client library. It knows names and values, and
nothing of keys, chunks or checksums: those are RemoteBackend's. A value is a frame: a header of
``HEADER_BYTES`` and a payload, together under ONE name, so that no half of it can be lost alone
(fault 40).

Every method may be called from several I/O threads of RemoteBackend at once, blocks, and ends
within ``timeout_s`` of its call, or as soon after it as a new connection takes. Answers stand
position by position. A miss is a value. BackendTimeoutError (the deadline) and BackendError (the
store as a whole: unreachable, refuses us, speaks nonsense) are raised ``from`` the client's own
exception, whose class names the cause in the metrics. Whatever a connection was doing when
something went wrong, it is never used again (fault 41). Messages never show a secret. Nothing is
retried here: RemoteBackend does it.

Names of values in a remote store: which chunk of which writer a value is. Pure.

``kvkeep-v1/IDENTITY/KEY``: the first 32 hex digits of the writer's identity digest (the whole of it
is in the header) and the 64 of the chunk's key. Only hex digits, a dash and slashes, so a name is
safe in every store, and never contains anything of a prompt or of a model's name.

RemoteReports: under which names the remote tier counts what happens. Callable from any thread.

The first failure of a kind is logged as a warning, the rest of them are only counted.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvkeep.backends.io_pool import IOPool
from kvkeep.backends.slow_tier import CircuitBreaker
from kvkeep.codec.frame import HEADER_BYTES, Buffer
from kvkeep.errors import BackendTimeoutError
from kvkeep.hashing import KEY_BYTES, ChunkKey
from kvkeep.metrics import LOAD, STORE, Metrics

__all__ = [
    "HEADER_BYTES",
    "ConnectorOptions",
    "Refusal",
    "RemoteConnector",
    "Value",
    "ValueSink",
]


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """What a connector is told beside its URL.

    Attributes:
        connections: threads that will call at once; more connections are never needed.
        connect_timeout_s: for a new connection, within the deadline of the call that makes it.
        ttl_s: the store forgets a value so long after it was put; None: never. A connector whose
            store cannot do that raises ConfigError when it is made.
        max_value_bytes: no value is larger, header included.
    """

    connections: int = 4
    connect_timeout_s: float = 1.0
    ttl_s: float | None = None
    max_value_bytes: int = 1 << 30


class Value:
    """A value to put: one name gets header and payload, back to back.

    Attributes:
        payload: contiguous bytes; memory of the pool, or what a codec made of it. It does not
            change during the call, and must not be kept after it.
    """

    __slots__ = ("_header", "payload")

    def __init__(self, header: bytes, payload: Buffer) -> None:
        """A value whose header is known."""
        self._header = header
        self.payload = payload

    @property
    def header(self) -> bytes:
        """``HEADER_BYTES`` bytes. Reading it may take a pass over the payload, for a checksum.

        So it is asked for by the thread that called ``put``, right before the payload is sent.
        """
        return self._header

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole value; known before the header is."""
        return len(self._header) + memoryview(self.payload).nbytes

    def sending(self, payload_bytes: int) -> None:
        """The first ``payload_bytes`` bytes of the payload are about to be sent, or just were.

        For clients that can send the header last: what it has to know of these bytes is taken while
        they are in the processor's cache.
        """


class Refusal(StrEnum):
    """Why a store that works did not take a value. The chunk is dropped, and counted so."""

    FULL = "store_full"
    """Its memory or quota is used up."""
    READ_ONLY = "read_only"
    """We may not write, or the server is a replica."""
    TOO_LARGE = "too_large"
    """It takes no value of this size."""
    REFUSED = "refused"
    """Any other answer that is no fault of the store as a whole."""


class ValueSink(ABC):
    """Where one value goes that is read.

    Called by the thread that called ``get``, in this order:

        begin    once, if there is a value
        filled   as often as is convenient, or never
        finish   once the payload is complete

    Nothing is called for a name that the store does not have. RemoteBackend verifies, decodes and
    answers for the value inside ``finish``, so a connector calls it as soon as it can, not at the
    end of the batch. A sink that was begun and not finished when ``get`` ends is a miss.
    """

    @abstractmethod
    def expected(self, payload_bytes: int) -> memoryview | None:
        """Memory that a payload of this size may be read into before its header is known.

        For clients that fill memory with the whole value in one call. It is what :meth:`begin` will
        return, if the header is as expected; that must be compared (``is``) afterwards. None: read
        the header first.
        """

    @abstractmethod
    def begin(self, header: Buffer, size_bytes: int) -> memoryview | None:
        """A value is there.

        Args:
            header: its first ``HEADER_BYTES`` bytes, or all of it if it is shorter, also empty.
            size_bytes: of the whole value, as the store says.

        Returns:
            Writable memory for exactly the ``size_bytes - HEADER_BYTES`` bytes of payload; None if
            the value is refused: skip it, and call nothing more on this sink.
        """

    @abstractmethod
    def filled(self, payload_bytes: int) -> None:
        """The first ``payload_bytes`` bytes of the payload are in memory and stay as they are.

        Lets them be verified while they are in the processor's cache.
        """

    @abstractmethod
    def finish(self) -> None:
        """The payload is complete."""

    @abstractmethod
    def hold(self) -> Callable[[], None]:
        """Keep the memory that :meth:`expected` gave from being used for anything else.

        For a client whose call writes there and cannot be ended: it is held before ``get`` returns,
        until the function that this returns is called, from any thread, when the call has ended.
        """

    @abstractmethod
    def fail(self, cause: str) -> None:
        """Something is under this name that is no value of ours (say, a list). It is removed."""


class RemoteConnector(ABC):
    """One store."""

    #: What people are shown: the URL without secrets.
    description: str
    #: ``sizes`` is one request for all names. Where it is one for each, loads do without it: a
    #: request for a value that is not there costs no more; and stores ask for fewer.
    sizes_at_once = True
    #: Most values that RemoteBackend gives one call. Where they travel one after the other, small
    #: calls keep all threads busy up to the end.
    max_values_per_call = 8

    @abstractmethod
    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int]:
        """Bytes of each whole value; 0 where there is none, or an empty one (fault 44).

        One request for all names, where the store has it.

        Raises:
            BackendError: the store failed.
        """

    @abstractmethod
    def put(
        self, names: Sequence[str], values: Sequence[Value], timeout_s: float
    ) -> list[Refusal | None]:
        """Store values whole or not at all, in place of what was there; None where it is in.

        Args:
            names: different from each other.
            values: position by position; no extra copy is made where the client can do without.
            timeout_s: for all of them.

        Raises:
            BackendError: the store failed. Some of the values may be in.
        """

    @abstractmethod
    def get(self, names: Sequence[str], sinks: Sequence[ValueSink], timeout_s: float) -> None:
        """Read values into sinks.

        A size is bounded (``max_value_bytes``) before anything is allocated or read: a larger one
        goes to ``begin`` with an empty header. When this returns or raises, nothing writes into a
        sink's memory any more that is not held (``hold``), whatever a server still sends.

        Raises:
            BackendError: the store failed. Sinks that were finished before are good.
        """

    @abstractmethod
    def remove(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """Remove values, and whatever else has these names; True where there was something.

        Raises:
            BackendError: the store failed.
        """

    @abstractmethod
    def names(self, prefix: str, timeout_s: float) -> Iterator[str]:
        """Every name that starts with ``prefix``, in no particular order, perhaps one twice.

        For clearing, inspection and tests. Each request of it has ``timeout_s``.

        Raises:
            BackendError: the store failed.
        """

    @abstractmethod
    def ping(self, timeout_s: float) -> None:
        """Make sure that the store answers, over a connection that may be a new one.

        Raises:
            BackendError: it does not.
        """

    def register(self, pool: memoryview) -> None:  # noqa: B027 - most clients need nothing of it
        """All memory that payloads and sinks' memory outside of codecs lie in; called once, first.

        For clients whose transfers need registered memory. What they cannot register they copy.
        """

    @abstractmethod
    def close(self) -> None:
        """End all connections; a second call does nothing. Running calls end soon, as failed."""


#: What all names start with; another form of names or values gets another one.
ROOT = "kvkeep-v1/"
#: Names that one page of a listing holds.
LIST_BATCH = 500
_IDENTITY_DIGITS = 32


def name_prefix(identity_digest: bytes) -> str:
    """What the names of one writer's values start with."""
    return f"{ROOT}{identity_digest.hex()[:_IDENTITY_DIGITS]}/"


def value_name(prefix: str, key: ChunkKey) -> str:
    """The name of a chunk, from :func:`name_prefix` and its key."""
    return prefix + key.hex()


def key_of(prefix: str, name: str) -> ChunkKey | None:
    """The key of the chunk that has this name; None if it is no chunk of this writer."""
    digits = name.removeprefix(prefix)
    if digits == name or len(digits) != 2 * KEY_BYTES:
        return None
    try:
        key = ChunkKey(bytes.fromhex(digits))
    except ValueError:
        return None
    return key if value_name(prefix, key) == name else None


TIER = "RemoteBackend"

_log = logging.getLogger(__name__)


def cause_of(error: BaseException) -> str:
    """``timeout``, or the class of the client's exception: connectors raise ``from`` it."""
    if isinstance(error, BackendTimeoutError):
        return "timeout"
    return type(error.__cause__ or error).__name__


class RemoteReports:
    """The tier's part of the metrics; one method per kind of event."""

    def __init__(self, metrics: Metrics) -> None:
        """Count into ``metrics``."""
        self._metrics = metrics
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str]] = set()  # guarded by _lock
        #: What the store said when it failed last, for people.
        self.last_error = ""

    def watch(self, pool: IOPool, loads: CircuitBreaker, stores: CircuitBreaker) -> None:
        """Read the tier's gauges from their owners."""
        self._metrics.watch_breaker(TIER, LOAD, lambda: loads.is_open)
        self._metrics.watch_breaker(TIER, STORE, lambda: stores.is_open)
        self._metrics.watch_queue(
            TIER,
            loads=lambda: pool.num_loads,
            stores=lambda: pool.num_stores,
            num_bytes=lambda: pool.queued_bytes,
        )

    def failed(self, operation: str, error: Exception) -> None:
        """A call to the store failed."""
        cause = cause_of(error)
        self.last_error = str(error)
        self.fault(operation, cause)
        with self._lock:
            is_new = (operation, cause) not in self._seen
            self._seen.add((operation, cause))
        # as text: a record that is kept would keep the error, its frames, and memory of the pool
        _log.log(logging.WARNING if is_new else logging.DEBUG, "%s: %s", operation, str(error))

    def fault(self, operation: str, cause: str) -> None:
        """Something else went wrong, or a value did not verify. A miss by itself is no fault."""
        self._metrics.failure(TIER, operation, cause)

    def dropped(self, cause: str) -> None:
        """A chunk was taken in and then not stored; only this tier can know."""
        self._metrics.dropped(TIER, cause, 1)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """A chunk was read and verified."""
        self._metrics.moved(TIER, LOAD, size_bytes, seconds)

    def stored(self, size_bytes: int, seconds: float) -> None:
        """A chunk was written."""
        self._metrics.moved(TIER, STORE, size_bytes, seconds)
