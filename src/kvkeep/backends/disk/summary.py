"""Summary: what a cache directory holds, by who wrote it. From headers alone; blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvkeep.backends.disk.ledger import LedgerState
from kvkeep.backends.disk.scan import FoundChunk
from kvkeep.backends.disk.survey import Survey
from kvkeep.codec.frame import HEADER_BYTES


@dataclass(slots=True)
class Holding:
    """The chunks of one identity.

    Attributes:
        identity: digest of the writer's identity. Names of models are not on the disk.
        chunks: their number.
        size_bytes: of their files.
        oldest_ns: when the one that was not used for longest was used, in Unix time.
        newest_ns: when the one that was used last was used.
        forms: number of chunks by format, element type and shape.
    """

    identity: bytes
    chunks: int = 0
    size_bytes: int = 0
    oldest_ns: int = 1 << 63
    newest_ns: int = 0
    forms: Counter[tuple[str, str, tuple[int, ...]]] = field(default_factory=Counter)

    def add(self, chunk: FoundChunk) -> None:
        """Count one more."""
        meta = chunk.header.meta
        self.chunks += 1
        self.size_bytes += HEADER_BYTES + chunk.header.payload_bytes
        self.oldest_ns = min(self.oldest_ns, chunk.used_ns)
        self.newest_ns = max(self.newest_ns, chunk.used_ns)
        self.forms[meta.fmt.name, meta.dtype, meta.shape] += 1


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a directory.

    Attributes:
        holdings: by identity, the largest first.
        causes: number of files that are no good by their header, by cause.
        ledger: its content; None if it does not verify.
    """

    holdings: tuple[Holding, ...]
    causes: Counter[str]
    ledger: LedgerState | None


def summarize(survey: Survey) -> Summary:
    """Read every header.

    Raises:
        OSError: the ledger cannot be read.
    """
    holdings: dict[bytes, Holding] = {}
    causes: Counter[str] = Counter()
    for item in survey.look():
        if isinstance(item, FoundChunk):
            identity = item.header.identity
            holdings.setdefault(identity, Holding(identity)).add(item)
        else:
            causes[str(item.cause)] += 1
    largest_first = sorted(holdings.values(), key=lambda one: (-one.size_bytes, one.identity))
    return Summary(tuple(largest_first), causes, survey.ledger())
