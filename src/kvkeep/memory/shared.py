"""SharedSegment: a named piece of POSIX shared memory, made by one process and opened by others.

The maker holds a file lock for as long as it lives, so a name that a killed process left behind is
recognised and taken over, and a name in use is refused. Call it from one thread.

MappedPool: another process's pool, to read from.

Its owner hands out the memory; here are views of it, which belong to nobody. Callable from any
thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvkeep.errors import OwnershipError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj, MemoryObjMetadata

#: Where Linux keeps POSIX shared memory.
_DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MAKE_ATTEMPTS = 8
#: Without it Linux refuses to map more than it has. The mmap module names it from Python 3.13 on.
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class SharedSegment:
    """An open segment; ``fd`` can be mapped until :meth:`close`."""

    def __init__(self, name: str, fd: int, size_bytes: int, *, is_maker: bool) -> None:
        """Called by :meth:`make` and :meth:`open` only."""
        self.name = name
        self.fd = fd
        self.size_bytes = size_bytes
        self._is_maker = is_maker

    @classmethod
    def make(cls, name: str, size_bytes: int) -> SharedSegment:
        """A new, empty segment.

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``.
            size_bytes: its size; memory is committed when it is first written.

        Raises:
            ValueError: the name is malformed, or there is less shared memory than ``size_bytes``.
            OwnershipError: a living process has made a segment of this name.
            OSError: the system refuses.
        """
        path = _path(name)
        for _ in range(_MAKE_ATTEMPTS):
            fd = _create_locked(path)
            if fd is None:
                _remove_if_abandoned(path)
                continue
            try:
                _check_room(size_bytes)
                os.ftruncate(fd, size_bytes)
            except BaseException:
                path.unlink(missing_ok=True)
                os.close(fd)
                raise
            return cls(name, fd, size_bytes, is_maker=True)
        raise OwnershipError(f"shared memory {name!r} is being made by other processes")

    @classmethod
    def make_unnamed(cls, size_bytes: int) -> SharedSegment:
        """A new segment without a name, for those that its descriptor is sent to.

        Nothing is left of it once nobody has it open any more, however its maker ended.

        Raises:
            ValueError: this system has no such memory.
            OSError: the system refuses.
        """
        if sys.platform != "linux":
            raise ValueError(f"shared memory without a name needs Linux, this is {sys.platform}")
        fd = os.memfd_create("kvkeep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fixed)  # who maps it can rely on its size
        except BaseException:
            os.close(fd)
            raise
        return cls("", fd, size_bytes, is_maker=False)

    @classmethod
    def open(cls, name: str) -> SharedSegment:
        """The segment that another process made.

        Raises:
            ValueError: the name is malformed.
            FileNotFoundError: there is none of this name.
        """
        fd = os.open(_path(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return cls(name, fd, os.fstat(fd).st_size, is_maker=False)

    def close(self) -> None:
        """Let go of the segment; the maker also removes its name. A second call does nothing."""
        if self.fd < 0:
            return
        if self._is_maker:
            _path(self.name).unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = -1


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot name shared memory: up to 200 letters, digits, '.', '_' and '-'"
        )
    if not _DIRECTORY.is_dir():
        raise ValueError(f"named shared memory needs {_DIRECTORY}, which this system lacks")
    return _DIRECTORY / f"kvkeep-{name}"


def _create_locked(path: Path) -> int | None:
    """A descriptor of the new file ``path``, locked; None if it exists."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # somebody took it for abandoned before it was locked
        os.close(fd)
        return None
    if _is_file(path, fd):
        return fd
    os.close(fd)
    return None


def _remove_if_abandoned(path: Path) -> None:
    """Remove ``path`` if its maker is gone.

    Raises:
        OwnershipError: its maker lives.
    """
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(path, fd):
                path.unlink()
        except BlockingIOError:
            raise OwnershipError(f"{path} belongs to a living process") from None
        finally:
            os.close(fd)


def _is_file(path: Path, fd: int) -> bool:
    """``path`` still names the file that ``fd`` is."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _check_room(size_bytes: int) -> None:
    """Writing beyond what the file system holds would kill the process (SIGBUS)."""
    room = os.statvfs(_DIRECTORY)
    free_bytes = room.f_bavail * room.f_frsize
    if size_bytes > free_bytes:
        raise ValueError(
            f"{size_bytes} bytes of shared memory were asked for, {_DIRECTORY} has {free_bytes}"
        )


class MappedPool:
    """A pool in shared memory, mapped so that writing to it changes nothing for its owner."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the memory.

        Args:
            fd: the memory; closed here, whatever happens.
            size_bytes: its size.

        Raises:
            ValueError: there is less.
            OSError: the system refuses.
        """
        try:
            if not 0 < size_bytes <= os.fstat(fd).st_size:
                raise ValueError(f"there are no {size_bytes} bytes of shared memory")
            # private, not read-only: what reads with torch wants memory that can be written
            self._map = mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
        finally:
            os.close(fd)
        self.size_bytes = size_bytes
        self.count_lock = threading.RLock()
        self._array = np.frombuffer(self._map, dtype=np.uint8)

    def view(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat
    ) -> MemoryObj:
        """The object at ``offset``, with a reference for the caller.

        Raises:
            ValueError: it is not inside the pool.
        """
        size = math.prod(shape) * dtype.itemsize
        if offset < 0 or offset + size > self.size_bytes:
            raise ValueError(f"[{offset}, {offset + size}) is not inside {self.size_bytes} bytes")
        meta = MemoryObjMetadata(tuple(shape), dtype, fmt, size)
        return MemoryObj(self, offset, self._array, meta)

    def note_release_locked(self, ended: MemoryObj | None) -> None:
        """Nothing: the memory is its owner's."""

    def close(self) -> None:
        """Let go of the memory; views that are still held stay readable."""
        self._array = np.empty(0, np.uint8)
        self.size_bytes = 0
        with contextlib.suppress(BufferError):  # views exist: the last one unmaps
            self._map.close()
