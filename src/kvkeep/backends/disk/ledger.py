"""The ledger: how many bytes a shared directory holds, and who has reserved how many more.

One file of 4,096 bytes, whose lock (``flock``) is the lock of the directory: whoever publishes or
removes a chunk file holds it. Little-endian:

    offset  size  field
         0     8  magic, b"KVKLEDGR"
         8     2  version, 1
        10     2  number of members, 0 to 126
        12     4  reserved, 0
        16     8  bytes in chunk files, each rounded up to 4,096
        24    32  reserved, 0
        56  4032  126 entries of 32 bytes: member id (16), bytes reserved (8), budget (8)
      4088     8  XXH3-64 of bytes 0 to 4087

A member is one open backend. It reserves before it writes and gives back after it unlinks, so that
a process that is killed at any moment leaves the sum too large, never too small; the next recount
corrects it. A ledger that does not verify is rebuilt by counting.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from kvkeep.backends.disk.files import FILE_MODE
from kvkeep.errors import BackendTimeoutError

MAGIC = b"KVKLEDGR"
VERSION = 1
LEDGER_BYTES = 4096
MEMBER_ID_BYTES = 16
MAX_MEMBERS = 126
#: Files are accounted in whole blocks of this size.
BLOCK_BYTES = 4096

_HEAD = struct.Struct("<8sHHIQ32s")
_MEMBER = struct.Struct("<16sQQ")
_CHECK = struct.Struct("<Q")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.01


def blocks(size_bytes: int) -> int:
    """Bytes that a file of ``size_bytes`` is accounted with."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(slots=True)
class Member:
    """What one open backend has reserved, and the budget it was given."""

    reserved_bytes: int
    budget_bytes: int


@dataclass(slots=True)
class LedgerState:
    """The content of a ledger."""

    stored_bytes: int = 0
    members: dict[bytes, Member] = field(default_factory=dict)

    @property
    def used_bytes(self) -> int:
        """Bytes in use or promised: chunk files, reservations, and the ledger itself."""
        reserved = sum(member.reserved_bytes for member in self.members.values())
        return LEDGER_BYTES + self.stored_bytes + reserved

    @property
    def budget_bytes(self) -> int:
        """The smallest budget of all members: nobody's is exceeded."""
        return min(member.budget_bytes for member in self.members.values())


def encode(state: LedgerState) -> bytes:
    """The 4,096 bytes of a ledger."""
    head = _HEAD.pack(MAGIC, VERSION, len(state.members), 0, state.stored_bytes, bytes(32))
    entries = [
        _MEMBER.pack(name, member.reserved_bytes, member.budget_bytes)
        for name, member in state.members.items()
    ]
    body = (head + b"".join(entries)).ljust(LEDGER_BYTES - _CHECK.size, b"\0")
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def decode(data: bytes) -> LedgerState | None:
    """The content of a ledger; None if it does not verify."""
    if len(data) != LEDGER_BYTES:
        return None
    body = data[: -_CHECK.size]
    magic, version, count, _, stored_bytes, _ = _HEAD.unpack_from(body)
    (check,) = _CHECK.unpack(data[-_CHECK.size :])
    if magic != MAGIC or version != VERSION or count > MAX_MEMBERS:
        return None
    if check != xxhash.xxh3_64_intdigest(body):
        return None
    state = LedgerState(stored_bytes)
    for index in range(count):
        name, reserved, budget = _MEMBER.unpack_from(body, _HEAD.size + index * _MEMBER.size)
        state.members[name] = Member(reserved, budget)
    return state


def lock_is_held(path: Path) -> bool:
    """Somebody holds the lock of this file; False if nobody does or there is no such file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class Ledger:
    """The ledger file of one directory, and its lock. Callable from any thread.

    ``flock`` excludes other open backends, in this process or another; a lock of the process
    excludes the other threads that share this object. Neither has a wait with a deadline of its
    own in the system, so the file's lock is asked for again, with growing pauses, until a deadline.
    """

    def __init__(self, path: Path, *, lock_timeout_s: float) -> None:
        """Nothing is opened yet.

        Args:
            path: of the ledger file.
            lock_timeout_s: how long to wait for somebody who holds the lock.
        """
        self._path = path
        self._lock_timeout_s = lock_timeout_s
        self._lock = threading.Lock()
        self._pause = threading.Event()  # set when closing, which ends every wait
        self._fd = -1  # guarded by _lock
        self._closed = False  # guarded by _lock

    @contextmanager
    def locked(self) -> Iterator[LedgerState | None]:
        """Hold the lock; yields the state, or None if the file is new or does not verify.

        The caller writes a changed state with :meth:`write_locked`.

        Raises:
            BackendTimeoutError: somebody held the lock for too long.
            OSError: the file cannot be opened or read.
        """
        deadline = time.monotonic() + self._lock_timeout_s
        # The two locks are taken one after the other, within one deadline.
        if not self._lock.acquire(timeout=self._lock_timeout_s):
            raise self._timeout()
        try:
            if self._closed:
                raise self._timeout()
            self._open_locked(deadline)
            try:
                yield decode(os.pread(self._fd, LEDGER_BYTES + 1, 0))
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def write_locked(self, state: LedgerState) -> None:
        """Write the state in one call. Only inside :meth:`locked`.

        Raises:
            OSError: the file system refused.
        """
        if os.fstat(self._fd).st_size != LEDGER_BYTES:
            os.ftruncate(self._fd, LEDGER_BYTES)
        data = encode(state)
        if os.pwrite(self._fd, data, 0) != len(data):
            raise OSError(errno.EIO, "the ledger was written in part")

    def close(self) -> None:
        """Close the file; waits for the lock end at once."""
        self._pause.set()
        with self._lock:
            self._closed = True
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _open_locked(self, deadline: float) -> None:
        """Open the file that has the ledger's name now, and lock it."""
        while True:
            if self._fd < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags, FILE_MODE)
            self._flock_locked(deadline)
            try:
                there = os.stat(self._path, follow_symlinks=False)
            except FileNotFoundError:
                there = None
            mine = os.fstat(self._fd)
            if there is not None and (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev):
                return
            os.close(self._fd)  # the directory was removed or the file replaced: take the new one
            self._fd = -1

    def _flock_locked(self, deadline: float) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._pause.wait(pause_s) or time.monotonic() >= deadline:
                    raise self._timeout() from None
                pause_s = min(pause_s * 2, _LAST_PAUSE_S)

    def _timeout(self) -> BackendTimeoutError:
        return BackendTimeoutError(
            f"the lock of {self._path} was not free within {self._lock_timeout_s:g} s",
            backend="LocalDiskBackend",
            operation="lock",
        )
