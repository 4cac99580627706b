"""DirectoryConnector: a directory that many machines share (``file://``).

For a parallel file system. A value is a file, written under a temporary name and renamed, so every
reader sees the old file, the new one, or none: no locks, which many shared file systems do not
have. There is no budget: who shares the directory limits it (a quota, or a job that removes files
not read for long; readers survive files that go). With a time to live, old files are no values,
and whoever meets one removes it. System calls have no deadline; RemoteBackend's callers have.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    TIER,
    ConnectorOptions,
    Refusal,
    RemoteConnector,
    Value,
    ValueSink,
)
from kvkeep.backends.slow_tier import pieces
from kvkeep.config.base import RemoteURL
from kvkeep.errors import BackendError, BackendTimeoutError, ConfigError

VALUE_SUFFIX, TEMP_SUFFIX = ".kvv", ".tmp"
#: A temporary file that was not written to for so long is nobody's any more.
TEMP_AGE_S = 3600.0
#: How many hex digits of a name its subdirectory has: 256 subdirectories for each writer.
_FAN_DIGITS = 2
_REFUSALS = {
    errno.ENOSPC: Refusal.FULL,
    errno.EDQUOT: Refusal.FULL,
    errno.EROFS: Refusal.READ_ONLY,
    errno.EACCES: Refusal.READ_ONLY,
    errno.EPERM: Refusal.READ_ONLY,
    errno.EFBIG: Refusal.TOO_LARGE,
}
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class DirectoryConnector(RemoteConnector):
    """Values as files below one directory."""

    sizes_at_once = False
    max_values_per_call = 1

    def __init__(self, url: RemoteURL, options: ConnectorOptions) -> None:
        """Use the directory of a URL like ``file:///mnt/shared/kvkeep``.

        Raises:
            ConfigError: the URL names another host, no absolute path, or an option.
        """
        if url.hosts not in ("", "localhost") or not url.path.startswith("/") or url.path == "/":
            raise ConfigError("write the directory as file:///absolute/path, without a host")
        if url.options or url.user or url.password:
            raise ConfigError("file:// has no options, user or password")
        self.description = url.masked
        self._root = url.path.rstrip("/")
        self._ttl_s = options.ttl_s
        self._max_value_bytes = options.max_value_bytes
        self._temp = f"{self._root}/kvkeep-tmp"
        self._writer = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._numbers = itertools.count()
        self._clean_at = 0.0  # when old temporary files are looked for next; a race costs one look

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int]:
        """See the interface. Something that is no file has the impossible size 1."""
        deadline = time.monotonic() + timeout_s
        with _as_store_errors("lookup"):
            return [self._size(name, deadline) for name in names]

    def _size(self, name: str, deadline: float) -> int:
        _check_time(deadline, "lookup")
        path = self._path(name)
        try:
            there = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        if not stat.S_ISREG(there.st_mode):
            return 1
        if self._is_old(there):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return 0
        return there.st_size

    def put(
        self, names: Sequence[str], values: Sequence[Value], timeout_s: float
    ) -> list[Refusal | None]:
        """See the interface."""
        deadline = time.monotonic() + timeout_s
        self._clean()
        return [self._put(name, value, deadline) for name, value in zip(names, values, strict=True)]

    def _put(self, name: str, value: Value, deadline: float) -> Refusal | None:
        path = self._path(name)
        temp = f"{self._temp}/{self._writer}-{next(self._numbers)}{TEMP_SUFFIX}"
        with _as_store_errors("put"):
            try:
                fd = self._open_new(temp)
                try:
                    _write(fd, value, deadline)
                finally:
                    os.close(fd)  # which may be where a shared file system says that it is full
                self._rename(temp, path)
            except (OSError, BackendTimeoutError) as error:
                with contextlib.suppress(OSError):
                    os.unlink(temp)
                refusal = _REFUSALS.get(error.errno or 0) if isinstance(error, OSError) else None
                if refusal is None:
                    raise
                return refusal
        return None

    def get(self, names: Sequence[str], sinks: Sequence[ValueSink], timeout_s: float) -> None:
        """See the interface."""
        deadline = time.monotonic() + timeout_s
        with _as_store_errors("get"):
            for name, sink in zip(names, sinks, strict=True):
                self._get(name, sink, deadline)

    def _get(self, name: str, sink: ValueSink, deadline: float) -> None:
        try:
            fd = os.open(self._path(name), _READ_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EACCES):
                raise
            sink.fail("not_a_file" if error.errno == errno.ELOOP else "permission")
            return
        try:
            there = os.fstat(fd)
            if not stat.S_ISREG(there.st_mode):
                sink.fail("not_a_file")
            elif not self._is_old(there):
                self._read(fd, there.st_size, sink, deadline)
        finally:
            os.close(fd)

    def _read(self, fd: int, size_bytes: int, sink: ValueSink, deadline: float) -> None:
        is_bounded = size_bytes <= self._max_value_bytes
        target = sink.begin(os.pread(fd, HEADER_BYTES, 0) if is_bounded else b"", size_bytes)
        if target is None:
            return
        for position, piece in pieces(target, HEADER_BYTES):
            done = 0
            while done < len(piece):
                _check_time(deadline, "get")
                count = os.preadv(fd, [piece[done:]], HEADER_BYTES + position + done)
                if count == 0:
                    sink.fail("truncated")  # since its size was asked for
                    return
                done += count
            sink.filled(position + done)
        sink.finish()

    def remove(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """See the interface. A directory is removed if it is empty."""
        deadline = time.monotonic() + timeout_s
        with _as_store_errors("remove"):
            return [self._remove(name, deadline) for name in names]

    def _remove(self, name: str, deadline: float) -> bool:
        _check_time(deadline, "remove")
        path = self._path(name)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (IsADirectoryError, PermissionError):
            if not stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode):
                raise
            os.rmdir(path)
        return True

    def names(self, prefix: str, timeout_s: float) -> Iterator[str]:
        """See the interface."""
        top, _, _ = prefix.rpartition("/")
        with _as_store_errors("list"):
            for folder, _, files in os.walk(f"{self._root}/{top}", onerror=_raise_if_there):
                place = Path(folder).relative_to(self._root).parent  # without the fan
                for file in files:
                    name = f"{place.as_posix()}/{file.removesuffix(VALUE_SUFFIX)}"
                    if file.endswith(VALUE_SUFFIX) and name.startswith(prefix):
                        yield name

    def ping(self, timeout_s: float) -> None:
        """See the interface. The directory itself is never made: it may be a mount that is away."""
        with _as_store_errors("ping"):
            os.scandir(self._root).close()

    def close(self) -> None:
        """See the interface: nothing is open between calls."""

    def _path(self, name: str) -> str:
        """Where a value is. Names come from RemoteBackend, and still cannot leave the directory."""
        parts = name.split("/")
        if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            raise ValueError(f"{name!r} is no name of a value")
        last = parts.pop()
        return "/".join((self._root, *parts, last[:_FAN_DIGITS], last + VALUE_SUFFIX))

    def _open_new(self, temp: str) -> int:
        """A descriptor of a new file; its folder is made if it is missing."""
        try:
            return os.open(temp, _WRITE_FLAGS, 0o600)
        except FileNotFoundError:
            self._make_folder(self._temp)
            return os.open(temp, _WRITE_FLAGS, 0o600)

    def _rename(self, temp: str, path: str) -> None:
        """Put a file where it belongs; the folders there are made if they are missing."""
        try:
            os.rename(temp, path)
        except FileNotFoundError:
            self._make_folder(os.path.dirname(path))
            os.rename(temp, path)

    def _make_folder(self, folder: str) -> None:
        """Make a folder and what is missing between the root and it, never the root."""
        missing = []
        while folder != self._root and not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for one in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(one, 0o700)

    def _is_old(self, there: os.stat_result) -> bool:
        """Its time to live is over, by the clock of whoever wrote it."""
        return self._ttl_s is not None and time.time() - there.st_mtime > self._ttl_s

    def _clean(self) -> None:
        """Remove what writers that died have left, at the first put and then once in a while."""
        now = time.monotonic()
        if now < self._clean_at:
            return
        self._clean_at = now + TEMP_AGE_S
        with contextlib.suppress(OSError), os.scandir(self._temp) as found:
            for entry in found:
                if not entry.name.endswith(TEMP_SUFFIX):
                    continue
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > TEMP_AGE_S:
                        os.unlink(entry.path)


def _write(fd: int, value: Value, deadline: float) -> None:
    """Write a payload, and then the header, which holds its checksum, before it."""
    payload = memoryview(value.payload).cast("B")
    start = value.size_bytes - len(payload)
    for position, piece in pieces(payload, start):
        _write_all(fd, piece, start + position, deadline)
        value.sending(position + len(piece))
    _write_all(fd, memoryview(value.header), 0, deadline)


def _write_all(fd: int, data: memoryview, offset: int, deadline: float) -> None:
    """Write at an offset, however little one call writes."""
    done = 0
    while done < len(data):
        _check_time(deadline, "put")
        done += os.pwrite(fd, data[done:], offset + done)


def _raise_if_there(error: OSError) -> None:
    """A directory that went is no error; one that cannot be read is."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _check_time(deadline: float, operation: str) -> None:
    if time.monotonic() > deadline:
        raise BackendTimeoutError("too slow", backend=TIER, operation=operation)


@contextlib.contextmanager
def _as_store_errors(operation: str) -> Iterator[None]:
    """Errors of the system as errors of the store."""
    try:
        yield
    except OSError as error:
        raise BackendError(
            f"{error.strerror} ({error.filename})", backend=TIER, operation=operation
        ) from error
