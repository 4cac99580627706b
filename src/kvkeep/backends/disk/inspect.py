"""Inspector: looks at a cache directory without being a member of it, and repairs it if asked.

For people and scripts, beside running engines or without any. Looking changes nothing; a repair is
a member for its time, and removes files only under the directory's lock, as engines do. What a file
is worth is decided as at every read, but for what only an engine knows: its identity and layout.
Every method blocks.

Summary: what a cache directory holds, by who wrote it. From headers alone; blocks.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvkeep.backends.disk.catalog import FoundChunk, open_chunk, probe
from kvkeep.backends.disk.directory import ROOT_NAME, DiskDirectory
from kvkeep.backends.disk.files import FileIO, cause_of, read_fully
from kvkeep.backends.disk.ledger import LEDGER_BYTES, LedgerState, decode
from kvkeep.backends.slow_tier import PIECE_BYTES
from kvkeep.codec.frame import HEADER_BYTES, FrameFault, FrameHeader, new_hasher
from kvkeep.errors import ConfigError
from kvkeep.hashing import KEY_BYTES, ChunkKey

#: More than any budget, so that a repair never evicts and never narrows the others' budget.
_NO_BUDGET = 1 << 62


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is no good.

    Attributes:
        path: of the file.
        cause: a :class:`FrameFault`; ``stranger`` for what is no chunk by its name; ``ledger``; or
            why it cannot be read, as ``permission`` or ``io_error``.
        inode: of the file that was looked at.
        removable: it is damaged; what cannot be read may be whole.
    """

    path: Path
    cause: str
    inode: int
    removable: bool = True


class Inspector:
    """One look at a cache directory."""

    def __init__(self, path: Path, io: FileIO | None = None) -> None:
        """Look at ``path``, the one in the settings, or at the directory below it.

        Raises:
            ConfigError: there is no disk tier in it.
            OSError: it cannot be read.
        """
        if path.name == ROOT_NAME:
            path = path.parent
        self._io = io if io is not None else FileIO()
        self._directory = DiskDirectory(path, budget_bytes=_NO_BUDGET, io=self._io)
        self.root = self._directory.root
        if not stat.S_ISDIR(os.stat(path).st_mode) or not self.root.is_dir():
            raise ConfigError(f"there is no disk tier in {path}: no directory {ROOT_NAME}")
        os.listdir(self.root)
        self.entries = list(self._directory.list_files())

    def ledger(self) -> LedgerState | None:
        """The ledger; None if it does not verify.

        Raises:
            OSError: it cannot be read.
        """
        fd = self._io.open_read(self._directory.ledger_path)
        try:
            data = bytearray(LEDGER_BYTES + 1)
            return decode(bytes(data[: read_fully(self._io, fd, [memoryview(data)])]))
        finally:
            self._io.close(fd)

    def look(self) -> Iterator[FoundChunk | Damage]:
        """Every chunk by its header alone, and every file that is no good by that."""
        return self._walk(lambda key: probe(self._io, self._directory, key))

    def verify(self) -> Iterator[FoundChunk | Damage | None]:
        """Every chunk by its header and payload, and every file that is no good.

        None stands for a file that went meanwhile, so there is one item per entry, and one for the
        ledger.
        """
        yield self._check_ledger()
        yield from self._walk_all(self._verify_chunk)

    def find(self, prefix: str) -> list[ChunkKey]:
        """Keys of the chunk files whose names start with these hex digits, sorted.

        Raises:
            ConfigError: these are no hex digits.
        """
        text = prefix.strip().lower()
        if not text or len(text) > 2 * KEY_BYTES or set(text) - set("0123456789abcdef"):
            raise ConfigError(f"{prefix!r} is not the beginning of a key: 1 to 64 hex digits")
        return sorted(key for key, _ in self.entries if key and key.hex().startswith(text))

    def examine(self, key: ChunkKey) -> FoundChunk | FrameFault | None:
        """One chunk, by header and payload; None if it went.

        Raises:
            OSError: it cannot be read.
        """
        return self._verify_chunk(key)

    def path_of(self, key: ChunkKey) -> Path:
        """The file of a chunk."""
        return self._directory.chunk_path(key)

    def repair(self, damages: list[Damage]) -> list[Path]:
        """Remove damaged files, what dead processes left, and count anew.

        Returns:
            Damaged files that could not be removed.

        Raises:
            OSError, BackendError: the directory cannot be changed, or its lock is held too long.
        """
        left = []
        self._directory.open()  # also counts, and writes a ledger that did not verify anew
        try:
            for damage in damages:
                if damage.removable and damage.cause != "ledger":
                    try:
                        self._directory.remove(damage.path, inode=damage.inode)
                    except OSError:
                        left.append(damage.path)
        finally:
            self._directory.close()
        return left

    def clear(self, identities: Collection[bytes] | None, report: Callable[[int], object]) -> int:
        """Remove all chunks, or those of some identities.

        What has a chunk's name and is none goes only with all.

        Args:
            identities: digests, as headers have them; None is all.
            report: told how many went.

        Returns:
            How many went. What cannot be removed or read stays.

        Raises:
            OSError, BackendError: the directory cannot be changed, or its lock is held too long.
        """
        removed = 0
        self._directory.open()
        try:
            for key, entry in self.entries:
                if key is None or (identities is not None and not self._is_of(key, identities)):
                    continue
                with contextlib.suppress(OSError):
                    removed += self._directory.remove(Path(entry.path), inode=entry.inode())
                report(removed)
        finally:
            self._directory.close()
        return removed

    def _is_of(self, key: ChunkKey, identities: Collection[bytes]) -> bool:
        try:
            found = probe(self._io, self._directory, key)
        except OSError:
            return False
        return isinstance(found, FoundChunk) and found.header.identity in identities

    def _walk(
        self, check: Callable[[ChunkKey], FoundChunk | FrameFault | None]
    ) -> Iterator[FoundChunk | Damage]:
        return (item for item in self._walk_all(check) if item is not None)

    def _walk_all(
        self, check: Callable[[ChunkKey], FoundChunk | FrameFault | None]
    ) -> Iterator[FoundChunk | Damage | None]:
        for key, entry in self.entries:
            path, inode = Path(entry.path), entry.inode()
            if key is None:
                yield Damage(path, "stranger", inode)
                continue
            try:
                found = check(key)
            except OSError as error:
                yield Damage(path, cause_of(error), inode, removable=False)
                continue
            yield Damage(path, found, inode) if isinstance(found, FrameFault) else found

    def _check_ledger(self) -> Damage | None:
        path = self._directory.ledger_path
        try:
            return Damage(path, "ledger", os.stat(path).st_ino) if self.ledger() is None else None
        except OSError as error:
            return Damage(path, cause_of(error), 0, removable=False)

    def _verify_chunk(self, key: ChunkKey) -> FoundChunk | FrameFault | None:
        found = probe(self._io, self._directory, key)
        if not isinstance(found, FoundChunk):
            return found
        fd = open_chunk(self._io, self._directory, key)
        if fd is None or isinstance(fd, FrameFault):
            return fd
        try:
            if os.fstat(fd).st_ino != found.inode:
                return None  # replaced by a new chunk in between
            fault = self._check_payload(fd, found.header)
        finally:
            self._io.close(fd)
        return fault or found

    def _check_payload(self, fd: int, header: FrameHeader) -> FrameFault | None:
        """Piece by piece, so that no chunk is too large."""
        piece = memoryview(bytearray(min(PIECE_BYTES, header.payload_bytes)))
        hasher, position = new_hasher(), 0
        while position < header.payload_bytes:
            part = piece[: header.payload_bytes - position]
            if read_fully(self._io, fd, [part], HEADER_BYTES + position) < len(part):
                return FrameFault.TRUNCATED
            hasher.update(part)
            position += len(part)
        return None if hasher.digest() == header.payload_checksum else FrameFault.PAYLOAD_CHECKSUM


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


def summarize(survey: Inspector) -> Summary:
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
