"""DiskOptions: what the disk tier is told. Plain values, usable from any thread."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvkeep.codec.base import Codec
from kvkeep.codec.raw import RawCodec

_RAW = RawCodec()


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What the disk tier is told.

    Attributes:
        path: the directory; everything lies below ``path/kvkeep-disk-v1``.
        size_bytes: budget of the directory, over all processes that use it.
        codec: how chunks are written. Those of any codec are read.
        threads: threads for file I/O, at least 2.
        queue_bytes: most memory that stores which wait for the disk may hold.
        load_timeout_s: a load that takes longer is a miss.
        lookup_timeout_s: a lookup answers by then with what was read and verified.
        stall_timeout_s: with one call running for longer, the tier is left out until it ends.
        open_timeout_s: how long the start waits for the scan; it goes on in the background, and
            the tier takes part when it ends.
        clear_timeout_s: how long a clear waits for the removal of files, which goes on likewise.
        close_timeout_s: how long closing waits for queued stores.
    """

    path: Path
    size_bytes: int
    codec: Codec = _RAW
    threads: int = 4
    queue_bytes: int = 1 << 30
    load_timeout_s: float = 10.0
    lookup_timeout_s: float = 0.7
    stall_timeout_s: float = 5.0
    open_timeout_s: float = 5.0
    clear_timeout_s: float = 30.0
    close_timeout_s: float = 30.0
