"""StoreInspector: what a remote store holds, by who wrote it, and its removal. For people; blocks.

RemoteRemoval: removes values from a store, and lists them.

Callable from any thread, which waits with a deadline; the calls are made in I/O threads, in small
pieces, so that none of them runs for long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    LIST_BATCH,
    ROOT,
    RemoteConnector,
    ValueSink,
)
from kvkeep.codec.frame import (
    MAX_CHUNK_BYTES,
    Buffer,
    FrameFault,
    FrameHeader,
    check_payload,
    parse_header,
)
from kvkeep.errors import ConfigError


@dataclass(slots=True)
class StoreHolding:
    """The values of one identity.

    Attributes:
        identity: the first hex digits of the digest of the writer's identity.
        chunks: their number.
        size_bytes: of them, headers included.
    """

    identity: str
    chunks: int = 0
    size_bytes: int = 0


class _WholeValue(ValueSink):
    """Reads one value, whatever it is."""

    def __init__(self) -> None:
        self.header: FrameHeader | FrameFault | None = None
        self._target = memoryview(bytearray())

    def expected(self, payload_bytes: int) -> memoryview | None:
        return None

    def begin(self, header: Buffer, size_bytes: int) -> memoryview | None:
        parsed = parse_header(header)
        self.header = parsed
        if isinstance(parsed, FrameFault):
            return None
        if size_bytes != HEADER_BYTES + parsed.payload_bytes:
            is_short = size_bytes < HEADER_BYTES + parsed.payload_bytes
            self.header = FrameFault.TRUNCATED if is_short else FrameFault.LENGTH
            return None
        self.header = FrameFault.TRUNCATED  # until it has come
        self._found = parsed
        self._target = memoryview(bytearray(parsed.payload_bytes))
        return self._target

    def filled(self, payload_bytes: int) -> None:
        pass

    def finish(self) -> None:
        self.header = check_payload(self._found, self._target) or self._found

    def hold(self) -> Callable[[], None]:
        return lambda: None

    def fail(self, cause: str) -> None:
        self.header = FrameFault.NOT_A_FILE


class StoreInspector:
    """Looks into a store."""

    def __init__(self, connector: RemoteConnector, timeout_s: float) -> None:
        """Look through ``connector``; each request has ``timeout_s``."""
        self._connector = connector
        self._timeout_s = timeout_s

    def holdings(self) -> list[StoreHolding]:
        """All values by identity, the largest first.

        Raises:
            BackendError: the store failed.
        """
        found: dict[str, StoreHolding] = {}
        names = self._names()
        while batch := list(dict.fromkeys(islice(names, LIST_BATCH))):
            sizes = self._connector.sizes(batch, self._timeout_s)
            for name, size in zip(batch, sizes, strict=True):
                identity = _identity_of(name)
                holding = found.setdefault(identity, StoreHolding(identity))
                holding.chunks += 1
                holding.size_bytes += size
        return sorted(found.values(), key=lambda one: (-one.size_bytes, one.identity))

    def clear(self, identities: Collection[str] | None, report: Callable[[int], object]) -> int:
        """Remove all values, or those of some identities.

        Args:
            identities: as :class:`StoreHolding` has them; None is all.
            report: told, now and then, how many went.

        Returns:
            How many there were.

        Raises:
            BackendError: the store failed; some may be gone.
        """
        removed = 0
        names = self._names()
        while batch := list(islice(names, LIST_BATCH)):
            chosen = [
                name
                for name in dict.fromkeys(batch)
                if identities is None or _identity_of(name) in identities
            ]
            removed += sum(self._connector.remove(chosen, self._timeout_s))
            report(removed)
        return removed

    def find(self, digits: str) -> str:
        """The name of the one value whose key starts with these hex digits.

        Raises:
            BackendError: the store failed.
            ConfigError: there is none, or several are.
        """
        some = list(
            islice((n for n in self._names() if n.rpartition("/")[2].startswith(digits)), 2)
        )
        if len(some) != 1:
            what = "several chunks have keys" if some else "no chunk has a key"
            raise ConfigError(f"{what} that start with {digits} in {self._connector.description}")
        return some[0]

    def examine(self, name: str) -> FrameHeader | FrameFault | None:
        """A value's header, once header and payload verify; what is wrong otherwise; None: gone.

        Raises:
            BackendError: the store failed.
        """
        sink = _WholeValue()
        self._connector.get([name], [sink], self._timeout_s)
        return sink.header

    def _names(self) -> Iterator[str]:
        return self._connector.names(ROOT, self._timeout_s)


def _identity_of(name: str) -> str:
    return name.removeprefix(ROOT).partition("/")[0]


#: For a connector that only looks: no value of ours is larger.
MOST_BYTES = HEADER_BYTES + MAX_CHUNK_BYTES


R = TypeVar("R")

#: Names of one request.
