"""RedisConnector: Redis and Valkey, one server, a cluster, or a master behind sentinels.

One string per chunk (fault 40): evicted as one, written as one. STRLEN says in one small answer
whether a value is there and how long it is (fault 44). Where a cluster sends us elsewhere, the
library's own client takes over for that name; it learns where the slot is, and the next call goes
there directly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import redis
from redis.connection import ConnectionPool
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    TIER,
    ConnectorOptions,
    Refusal,
    RemoteConnector,
    Value,
    ValueSink,
)
from kvkeep.backends.remote.redis_servers import open_servers
from kvkeep.backends.remote.redis_wire import (
    ErrorReply,
    PieceReader,
    RedisWire,
    command,
    set_command,
)
from kvkeep.backends.slow_tier import PIECE_BYTES
from kvkeep.codec.frame import Buffer
from kvkeep.config.base import RemoteURL
from kvkeep.errors import BackendError, BackendTimeoutError

#: A string of Redis is never longer (its default of proto-max-bulk-len).
MAX_STRING_BYTES = 512 << 20
#: Commands that are sent before their answers are read: of small ones, and of values.
_SMALL_WINDOW, _LEAST_WINDOW, _MOST_WINDOW = 1000, 2, 64
#: Values that were asked for and not read are about so large together: the server keeps them.
_WINDOW_BYTES = 4 << 20
#: A name that no value has.
_PROBE = "kvkeep-v1"
#: Errors that say: this name is another server's now.
_ELSEWHERE = frozenset({"MOVED", "ASK", "TRYAGAIN"})
#: Errors of a server that gives whole values only, or lets this user have nothing else.
_NO_PIECES = frozenset({"NOPERM", "ERR"})
#: Errors after which a server is alive and lets us ask.
_ALIVE = _ELSEWHERE | {"WRONGTYPE"}
#: Errors of the server as a whole.
_SERVER_ERRORS: dict[str, type[RedisError]] = {
    "LOADING": BusyLoadingError,
    "MASTERDOWN": MasterDownError,
    "CLUSTERDOWN": ClusterDownError,
    "NOAUTH": AuthenticationError,
    "WRONGPASS": AuthenticationError,
}
_ERRORS = {**_SERVER_ERRORS, "NOPERM": NoPermissionError, "READONLY": ReadOnlyError}
_REFUSALS = {"OOM": Refusal.FULL, "READONLY": Refusal.READ_ONLY}

_Wanted = tuple[str, ValueSink]


class RedisConnector(RemoteConnector):
    """Values as strings."""

    def __init__(self, url: RemoteURL, options: ConnectorOptions) -> None:
        """Use the servers of a URL. Nothing is connected yet.

        Raises:
            ConfigError: the URL is wrong.
        """
        self.description = url.masked
        self._servers = open_servers(url, options)
        self._max_value_bytes = options.max_value_bytes
        #: Values may be larger than a piece, and no server has refused to give pieces.
        self._reads_pieces = options.max_value_bytes > HEADER_BYTES + PIECE_BYTES
        self._ttl_ms = None if options.ttl_s is None else max(1, round(options.ttl_s * 1000))

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int]:
        """See the interface. Something that is no string has the impossible size 1."""
        deadline = time.monotonic() + timeout_s
        with self._as_store_errors("lookup"):
            replies = self._ask("STRLEN", names, deadline)
        return [1 if isinstance(reply, ErrorReply) else int(reply) for reply in replies]

    def remove(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """See the interface."""
        deadline = time.monotonic() + timeout_s
        with self._as_store_errors("remove"):
            replies = self._ask("UNLINK", names, deadline)
            for reply in replies:
                if isinstance(reply, ErrorReply):
                    raise _error_of(reply)
        return [reply != 0 for reply in replies]

    def _ask(
        self, verb: str, names: Sequence[str], deadline: float
    ) -> list[int | str | ErrorReply]:
        """The answers to one small command per name, position by position."""
        replies: list[int | str | ErrorReply] = [0] * len(names)
        for pool, indexes in self._servers.by_pool(names):
            with _borrowed(pool, deadline) as wire:
                for start in range(0, len(indexes), _SMALL_WINDOW):
                    some = indexes[start : start + _SMALL_WINDOW]
                    wire.send([b"".join(command(verb, names[i]) for i in some)], len(some))
                    for index in some:
                        replies[index] = wire.read_reply()
        for index, reply in enumerate(replies):
            if isinstance(reply, ErrorReply):
                replies[index] = self._ask_elsewhere(verb, names[index], reply)
        return replies

    def _ask_elsewhere(self, verb: str, name: str, reply: ErrorReply) -> int | ErrorReply:
        """The answer of the server that has the name now; any other error as it is."""
        self._raise_server_error(reply)
        if reply.code not in _ELSEWHERE:
            return reply
        return int(self._servers.client().execute_command(verb, name))

    def put(
        self, names: Sequence[str], values: Sequence[Value], timeout_s: float
    ) -> list[Refusal | None]:
        """See the interface."""
        deadline = time.monotonic() + timeout_s
        answers: list[Refusal | None] = [None] * len(names)
        with self._as_store_errors("put"):
            for pool, indexes in self._servers.by_pool(names):
                fitting = [i for i in indexes if values[i].size_bytes <= MAX_STRING_BYTES]
                for index in set(indexes) - set(fitting):
                    answers[index] = Refusal.TOO_LARGE
                replies = []
                with _borrowed(pool, deadline) as wire:
                    for index in fitting:
                        wire.send(self._set(names[index], values[index]), 1)
                    replies = [wire.read_reply() for _ in fitting]
                for index, reply in zip(fitting, replies, strict=True):
                    answers[index] = self._refusal(names[index], values[index], reply)
        return answers

    def _set(self, name: str, value: Value) -> list[Buffer]:
        before, after = set_command(name, value.size_bytes, self._ttl_ms)
        return [before + value.header, value.payload, after]

    def _refusal(self, name: str, value: Value, reply: int | str | ErrorReply) -> Refusal | None:
        """What a server's answer to one SET means."""
        if not isinstance(reply, ErrorReply):
            return None
        self._raise_server_error(reply)
        if reply.code not in _ELSEWHERE:
            return _REFUSALS.get(reply.code, Refusal.REFUSED)
        data = b"".join((value.header, value.payload))
        try:
            self._servers.client().set(name, data, px=self._ttl_ms)
        except ResponseError as error:
            return _REFUSALS.get(str(error).partition(" ")[0], Refusal.REFUSED)
        return None

    def get(self, names: Sequence[str], sinks: Sequence[ValueSink], timeout_s: float) -> None:
        """See the interface."""
        deadline = time.monotonic() + timeout_s
        elsewhere: list[_Wanted] = []
        with self._as_store_errors("get"):
            for pool, indexes in self._servers.by_pool(names):
                rest = [(names[index], sinks[index]) for index in indexes]
                while rest:
                    get = self._get_pieces if self._reads_pieces else self._get_some
                    rest = rest[get(pool, rest, deadline, elsewhere) :]
            for name, sink in elsewhere:
                self._get_elsewhere(name, sink)

    def _get_some(
        self,
        pool: ConnectionPool,
        wanted: Sequence[_Wanted],
        deadline: float,
        elsewhere: list[_Wanted],
    ) -> int:
        """Read values from one server over one connection; returns how many are dealt with.

        Those are fewer than asked for after one that is too large to be read: the connection is
        given up then.
        """
        window, sent = _LEAST_WINDOW, 0
        with _borrowed(pool, deadline) as wire:
            for done, (name, sink) in enumerate(wanted):
                if sent < min(len(wanted), done + window):
                    some = wanted[sent : done + window]
                    wire.send([b"".join(command("GET", other) for other, _ in some)], len(some))
                    sent += len(some)
                size = wire.read_size()
                if isinstance(size, ErrorReply):
                    self._note_error(size, (name, sink), elsewhere)
                elif size is not None and size > self._max_value_bytes:
                    sink.begin(b"", size)
                    return done + 1
                elif size is not None:
                    _read_value(wire, size, sink)
                    window = min(_MOST_WINDOW, max(_LEAST_WINDOW, _WINDOW_BYTES // max(1, size)))
        return len(wanted)

    def _get_pieces(
        self,
        pool: ConnectionPool,
        wanted: Sequence[_Wanted],
        deadline: float,
        elsewhere: list[_Wanted],
    ) -> int:
        """The same piece by piece; the rest is not dealt with where that is not allowed."""
        with _borrowed(pool, deadline) as wire:
            reader = PieceReader(wire, wanted, self._max_value_bytes)
            for done, one in enumerate(wanted):
                error = reader.read(done)
                if error is None:
                    continue
                if error.code in _NO_PIECES:
                    self._reads_pieces = False
                    return done
                self._note_error(error, one, elsewhere)
        return len(wanted)

    def _note_error(self, error: ErrorReply, wanted: _Wanted, elsewhere: list[_Wanted]) -> None:
        """A server's answer for one value is an error."""
        self._raise_server_error(error)
        if error.code in _ELSEWHERE:
            elsewhere.append(wanted)
        else:
            wanted[1].fail("wrong_type")

    def _get_elsewhere(self, name: str, sink: ValueSink) -> None:
        data = self._servers.client().get(name)
        if not isinstance(data, bytes):
            return
        target = sink.begin(data[:HEADER_BYTES], len(data))
        if target is not None:
            target[:] = data[HEADER_BYTES:]
            sink.finish()

    def names(self, prefix: str, timeout_s: float) -> Iterator[str]:
        """See the interface. The prefix has none of the characters that a pattern has."""
        with self._as_store_errors("list"):
            for name in self._servers.client().scan_iter(match=f"{prefix}*", count=1000):
                yield name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)

    def ping(self, timeout_s: float) -> None:
        """See the interface. Every server that holds values must answer a question for one.

        A cluster in which a slot is served by nobody answers PING, and no such question.
        """
        deadline = time.monotonic() + timeout_s
        with self._as_store_errors("ping"):
            for pool in self._servers.pools():
                with _borrowed(pool, deadline) as wire:
                    wire.send([command("STRLEN", _PROBE)], 1)
                    reply = wire.read_reply()
                if isinstance(reply, ErrorReply) and reply.code not in _ALIVE:
                    raise _error_of(reply)

    def close(self) -> None:
        """See the interface."""
        with contextlib.suppress(RedisError, OSError):
            self._servers.close()

    def _raise_server_error(self, reply: ErrorReply) -> None:
        """Raise what an answer says about the server as a whole, if it does."""
        if reply.code in _SERVER_ERRORS or (self._servers.moves and reply.code == "READONLY"):
            raise _error_of(reply)

    @contextlib.contextmanager
    def _as_store_errors(self, operation: str) -> Iterator[None]:
        """Errors of the client and of sockets as errors of the store."""
        try:
            yield
        except (redis.TimeoutError, TimeoutError) as error:
            self._servers.forget()
            raise BackendTimeoutError(str(error), backend=TIER, operation=operation) from error
        except (RedisError, OSError) as error:
            self._servers.forget()
            text = f"{type(error).__name__}: {error}"
            raise BackendError(text, backend=TIER, operation=operation) from error


@contextlib.contextmanager
def _borrowed(pool: ConnectionPool, deadline: float) -> Iterator[RedisWire]:
    """A connection of a pool. One that is not in step afterwards is closed, never used again."""
    connection = pool.get_connection()
    wire = None
    try:
        sock = connection._sock  # the library has no public name for it
        wire = RedisWire(sock, deadline)
        yield wire
    finally:
        if wire is not None and wire.is_in_step:
            sock.settimeout(connection.socket_timeout)
        else:
            connection.disconnect()
        pool.release(connection)


def _read_value(wire: RedisWire, size: int, sink: ValueSink) -> None:
    header = memoryview(bytearray(min(size, HEADER_BYTES)))
    wire.read_value(header)
    target = sink.begin(header, size)
    if target is None:
        wire.read_value(memoryview(bytearray(size - len(header))))  # bounded by the caller
        wire.end_value()
        return
    wire.read_value(target, sink.filled)
    wire.end_value()
    sink.finish()


def _error_of(reply: ErrorReply) -> RedisError:
    error: RedisError = _ERRORS.get(reply.code, ResponseError)(reply.text)
    return error
