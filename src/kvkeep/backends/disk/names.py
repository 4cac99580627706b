"""Names in a cache directory, and what can be read from them. Pure but for listing and sizes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvkeep.backends.disk.ledger import MEMBER_ID_BYTES
from kvkeep.keys import KEY_BYTES, ChunkKey

#: Name of the directory below the user's path, with the version of its form.
ROOT_NAME = "kvkeep-disk-v1"
CHUNK_SUFFIX, TEMP_SUFFIX = ".kvc", ".tmp"


@dataclass(frozen=True, slots=True)
class TempFile:
    """A reservation, and the name under which its chunk is written.

    Attributes:
        path: of the file; it does not exist yet when the reservation is made.
        reserved_bytes: what was reserved for it.
    """

    path: Path
    reserved_bytes: int


def chunk_name(key: ChunkKey) -> Path:
    """Path of a chunk file below ``chunks``: hex digits only, so no key can name another place."""
    return Path(chunk_file(key))


def chunk_file(key: ChunkKey) -> str:
    """:func:`chunk_name` as text: making a path takes longer than reading a header."""
    name = key.hex()
    return f"{name[:2]}/{name}{CHUNK_SUFFIX}"


def temp_name(owner: bytes, number: int, reserved_bytes: int) -> str:
    """Name of a file that a member is writing."""
    return f"{owner.hex()}-{number}-{reserved_bytes}{TEMP_SUFFIX}"


def list_entries(path: Path) -> list[os.DirEntry[str]]:
    """What is in a directory; nothing if there is none."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def size_of(path: Path) -> int:
    """Size of a file; 0 if there is none."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def key_of(fan: str, name: str) -> ChunkKey | None:
    """The key of the chunk file ``fan/name``; None if that is no name of a chunk file."""
    digits = name.removesuffix(CHUNK_SUFFIX)
    try:
        key = ChunkKey(bytes.fromhex(digits))
    except ValueError:
        return None
    is_own = digits == key.hex() and name == digits + CHUNK_SUFFIX and fan == digits[:2]
    return key if is_own and len(key) == KEY_BYTES else None


def owner_of(name: str) -> tuple[bytes | None, int]:
    """Member id and reserved bytes in the name of a temporary or member file."""
    parts = name.removesuffix(TEMP_SUFFIX).split("-")
    try:
        owner = bytes.fromhex(parts[0])
        reserved = int(parts[2]) if len(parts) == 3 else 0
    except ValueError:
        return None, 0
    return (owner, reserved) if len(owner) == MEMBER_ID_BYTES else (None, 0)
