"""DiskDirectory: the files of one cache directory and their budget.

    PATH/kvkeep-disk-v1/
        ledger                          bytes in use and reserved; its lock is the directory's lock
        members/MEMBER                  locked as long as the backend that made it is open
        tmp/MEMBER-NUMBER-BYTES.tmp     a chunk being written; BYTES are reserved for it
        chunks/KK/KEY.kvc               a chunk: a frame; KEY in hex, KK its first two digits

A chunk file appears whole, by a rename under the lock, and is never changed afterwards. What
belongs to a member that is no longer alive is removed by whoever comes next. Used by the I/O
threads only:
every method blocks. Nothing outside of ``kvkeep-disk-v1`` is read or touched.

Names in a cache directory, and what can be read from them. Pure but for listing and sizes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvkeep.backends.disk.files import DIRECTORY_MODE, FILE_MODE, FileIO
from kvkeep.backends.disk.ledger import (
    MAX_MEMBERS,
    MEMBER_ID_BYTES,
    Ledger,
    LedgerState,
    Member,
    blocks,
    lock_is_held,
)
from kvkeep.errors import BackendError
from kvkeep.hashing import KEY_BYTES, ChunkKey

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


class DiskDirectory:
    """One member's view of a cache directory that several processes may share."""

    def __init__(
        self, path: Path, *, budget_bytes: int, io: FileIO, lock_timeout_s: float = 5.0
    ) -> None:
        """Nothing is read or made before :meth:`open`.

        Args:
            path: the user's directory.
            budget_bytes: most bytes of files in it, over all its processes.
            io: the system calls.
            lock_timeout_s: how long to wait for the lock.
        """
        self.root = path / ROOT_NAME
        self.budget_bytes = budget_bytes
        self._io = io
        self._chunks, self._temps = self.root / "chunks", self.root / "tmp"
        self._members = self.root / "members"
        self.ledger_path = self.root / "ledger"
        self.is_shared = False  # others were members at the last look; changed with the lock held
        self._ledger = Ledger(self.ledger_path, lock_timeout_s=lock_timeout_s)
        self._id = secrets.token_bytes(MEMBER_ID_BYTES)
        self._member_fd = -1  # changed with the ledger's lock held
        self._temps_open: dict[Path, int] = {}  # reserved bytes by path; guarded by _count_lock
        self._num_temps = 0  # guarded by _count_lock
        self._recount_due = False  # changed with the ledger's lock held
        self._count_lock = threading.Lock()

    # -- opening -----------------------------------------------------------------------------

    def open(self) -> None:
        """Make what is missing, become a member, remove what dead members left, and count.

        Raises:
            OSError, BackendError: it cannot be read or made, or its lock is held for too long.
        """
        self._make_directories()
        with self._transaction(recount=True):
            pass

    def close(self) -> None:
        """Stop being a member. Chunks stay. Failures do not matter: a dead member is found."""
        with contextlib.suppress(OSError, BackendError), self._transaction() as state:
            del state.members[self._id]
            (self._members / self._id.hex()).unlink(missing_ok=True)
        self._ledger.close()
        if self._member_fd >= 0:
            os.close(self._member_fd)
            self._member_fd = -1

    def chunk_path(self, key: ChunkKey) -> Path:
        """Where a chunk is, if it is there."""
        return Path(self.chunk_location(key))

    def chunk_location(self, key: ChunkKey) -> str:
        """:meth:`chunk_path` as text."""
        return f"{self._chunks}/{chunk_file(key)}"

    def used_bytes(self) -> int:
        """Bytes in use and reserved, over all members."""
        with self._transaction() as state:
            return state.used_bytes

    # -- writing -----------------------------------------------------------------------------

    def reserve(self, size_bytes: int, next_victim: Callable[[], Path | None]) -> TempFile | None:
        """Room for one more file, made by removing victims if there is none.

        Args:
            size_bytes: of the file.
            next_victim: called with the lock held, for the path of a chunk file to remove next, or
                None if there is none.

        Returns:
            None if there is no room and no victim.

        Raises:
            OSError, BackendError: see :meth:`open`.
        """
        needed, temp = blocks(size_bytes), None
        try:
            with self._transaction() as state:
                if self._make_room_locked(state, needed, next_victim):
                    temp = self._new_temp(needed)
        except (OSError, BackendError):
            if temp is not None:
                self._give_back(temp)  # the ledger could not be written: nothing is reserved
            raise
        return temp

    def commit(self, temp: TempFile, key: ChunkKey) -> None:
        """Give a finished file its chunk's name; its reservation becomes bytes in use.

        Raises:
            OSError, BackendError: it could not be; the caller calls :meth:`abort`.
        """
        path = self.chunk_path(key)
        with self._transaction() as state:
            replaced = size_of(path)
            try:
                self._io.rename(temp.path, path)
            except FileNotFoundError:
                path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
                self._io.rename(temp.path, path)
            self._give_back(temp)
            state.stored_bytes += temp.reserved_bytes - blocks(replaced)

    def abort(self, temp: TempFile) -> None:
        """Remove an unfinished file and give its reservation back. Never raises."""
        try:
            self._io.unlink(temp.path)
        except FileNotFoundError:
            pass
        except OSError:
            return  # it is still there, so it stays accounted until the next recount
        self._give_back(temp)
        with contextlib.suppress(OSError, BackendError), self._transaction():
            pass  # the ledger learns of it; if it cannot now, with the next transaction

    def remove(
        self,
        path: Path,
        *,
        inode: int | None = None,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Remove a file below ``chunks``: only if it is still ``inode``, if that is given.

        Not if ``unless``, which is called with the lock held, says otherwise.

        Returns:
            False if it was not there (any more).

        Raises:
            OSError, BackendError: it is there and could not be removed.
        """
        with self._transaction() as state:
            return not unless() and self._unlink_locked(state, path, inode=inode)

    def trim(self, next_victim: Callable[[], Path | None]) -> None:
        """Remove victims until what is there fits the budget."""
        with self._transaction() as state:
            self._make_room_locked(state, 0, next_victim)

    def recount(self) -> None:
        """Derive the bytes in use from what is there, and remove what dead members left."""
        with self._transaction(recount=True):
            pass

    # -- reading the directory ---------------------------------------------------------------

    def list_files(self) -> Iterator[tuple[ChunkKey | None, os.DirEntry[str]]]:
        """Everything below ``chunks``: with its key if its name and place are those of a chunk."""
        for fan in list_entries(self._chunks):
            if not fan.is_dir(follow_symlinks=False):
                yield None, fan
                continue
            for entry in list_entries(Path(fan.path)):
                yield key_of(fan.name, entry.name), entry

    # -- with the lock held ------------------------------------------------------------------

    @contextmanager
    def _transaction(self, *, recount: bool = False) -> Iterator[LedgerState]:
        """Hold the lock; what the caller changes in the state is written at the end, always."""
        self._make_directories()
        with self._ledger.locked() as found:
            state = found if found is not None else LedgerState()
            if recount or self._recount_due or self._id not in state.members:
                self._join_locked(state)
                self._recount_locked(state)
            self._recount_due = True  # unless what follows ends with a written ledger
            try:
                yield state
            finally:
                if self._id in state.members:
                    state.members[self._id].reserved_bytes = self._reserved_bytes()
                self.is_shared = len(state.members) > 1
                self._ledger.write_locked(state)
                self._recount_due = False

    def _join_locked(self, state: LedgerState) -> None:
        path = self._members / self._id.hex()
        if self._member_fd < 0 or not path.exists():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._member_fd >= 0:
                os.close(self._member_fd)
            self._member_fd = fd
        if self._id not in state.members:
            self._drop_dead_locked(state)
            if len(state.members) >= MAX_MEMBERS:
                raise BackendError(
                    f"more than {MAX_MEMBERS} open backends share {self.root}",
                    backend="LocalDiskBackend",
                    operation="open",
                )
        state.members[self._id] = Member(self._reserved_bytes(), self.budget_bytes)

    def _is_alive(self, name: bytes) -> bool:
        return name == self._id or lock_is_held(self._members / name.hex())

    def _drop_dead_locked(self, state: LedgerState) -> bool:
        dead = [name for name in state.members if not self._is_alive(name)]
        for name in dead:
            del state.members[name]
        return bool(dead)

    def _bury_dead_locked(self, state: LedgerState) -> None:
        """Take back what members that died have reserved."""
        if len(state.members) > 1 and self._drop_dead_locked(state):
            self._recount_locked(state)

    def _recount_locked(self, state: LedgerState) -> None:
        self._drop_dead_locked(state)
        unknown: dict[bytes, int] = {}
        stored = 0
        for entry in list_entries(self._temps):
            owner, reserved = owner_of(entry.name)
            if owner in state.members:
                continue
            if owner is not None and self._is_alive(owner):
                unknown[owner] = unknown.get(owner, 0) + reserved
                continue
            stored += self._discard(entry)
        for entry in list_entries(self._members):
            owner, _ = owner_of(entry.name)
            if owner is None or not self._is_alive(owner):
                stored += self._discard(entry)
        for owner, reserved in unknown.items():
            state.members[owner] = Member(reserved, self.budget_bytes)
        for _, entry in self.list_files():
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    stored += blocks(entry.stat(follow_symlinks=False).st_size)
        state.stored_bytes = stored

    def _discard(self, entry: os.DirEntry[str]) -> int:
        """Remove a file that nobody owns; returns the bytes it keeps using if that fails."""
        try:
            self._io.unlink(Path(entry.path))
        except OSError:
            return blocks(max(0, size_of(Path(entry.path))))
        return 0

    def _unlink_locked(self, state: LedgerState, path: Path, *, inode: int | None) -> bool:
        try:
            there = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if inode is not None and there.st_ino != inode:
            return False
        try:
            self._io.unlink(path)
        except FileNotFoundError:
            return False
        except IsADirectoryError:
            os.rmdir(path)  # only an empty one: what others keep below it is not ours to delete
            return True
        if stat.S_ISREG(there.st_mode):
            state.stored_bytes = max(0, state.stored_bytes - blocks(there.st_size))
        return True

    def _make_room_locked(
        self, state: LedgerState, needed: int, next_victim: Callable[[], Path | None]
    ) -> bool:
        if state.used_bytes + needed > state.budget_bytes:
            self._bury_dead_locked(state)
            if state.used_bytes - state.stored_bytes + needed > state.budget_bytes:
                return False  # not even an empty directory has room: nothing is removed in vain
        while state.used_bytes + needed > state.budget_bytes:
            victim = next_victim()
            if victim is None:
                return False
            self._unlink_locked(state, victim, inode=None)
        return True

    def _new_temp(self, reserved_bytes: int) -> TempFile:
        with self._count_lock:
            self._num_temps += 1
            name = temp_name(self._id, self._num_temps, reserved_bytes)
            temp = TempFile(self._temps / name, reserved_bytes)
            self._temps_open[temp.path] = reserved_bytes
        return temp

    def _give_back(self, temp: TempFile) -> None:
        with self._count_lock:
            self._temps_open.pop(temp.path, None)

    def _reserved_bytes(self) -> int:
        with self._count_lock:
            return sum(self._temps_open.values())

    def _make_directories(self) -> None:
        """Also in every transaction: somebody may have removed the directory."""
        for path in (self.root, self._chunks, self._temps, self._members):
            if not path.is_dir():
                path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
