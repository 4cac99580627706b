"""Where the lookup sockets live: one per rank, in a directory that only its owner can enter.

Pure path arithmetic and one directory; callable from any thread, in the scheduler and in the
workers alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from kvkeep.errors import LookupServiceError

#: Bytes that a Unix socket's path may have on every system: 107 on Linux, 103 on macOS.
MAX_PATH_BYTES = 103

#: A socket may be bound and not listened on yet for a moment; after that long it is no moment.
STALE_AFTER_S = 60.0
STALE_PROBE_TIMEOUT_S = 0.2


def socket_directory(base: Path | None, env: Mapping[str, str]) -> Path:
    """The directory of this user's lookup sockets.

    Args:
        base: the directory to make it in; None for ``$XDG_RUNTIME_DIR``, else the temporary
            directory.
        env: environment variables.
    """
    if base is None:
        runtime = env.get("XDG_RUNTIME_DIR")
        base = Path(runtime) if runtime and Path(runtime).is_dir() else Path(tempfile.gettempdir())
    return base / f"kvkeep-{os.getuid()}"


def socket_path(directory: Path, engine: str, rank: int) -> Path:
    """The socket of one worker.

    Args:
        directory: see :func:`socket_directory`.
        engine: name of the engine instance, of any length.
        rank: the worker's rank in it.

    Raises:
        LookupServiceError: the path is longer than a Unix socket's may be.
    """
    return _checked(directory / f"{_short(engine)}-{rank}.sock")


def _short(engine: str) -> str:
    return hashlib.sha256(engine.encode()).hexdigest()[:16]


def _checked(path: Path) -> Path:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise LookupServiceError(
            f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes; "
            "set lookup.socket_dir to a shorter directory"
        )
    return path


def ranks_path(directory: Path, engine: str) -> Path:
    """The socket where the ranks of an engine meet, beside those of their lookups.

    It answers no lookups, and so is no ``.sock``: `kvkeep top` does not ask it.

    Raises:
        LookupServiceError: the path is longer than a Unix socket's may be.
    """
    return _checked(directory / f"{_short(engine)}.ranks")


def make_private(directory: Path) -> None:
    """Create ``directory`` for this user alone, or check that it is so already.

    Raises:
        LookupServiceError: it cannot be made, belongs to somebody else, is a link, or others may
            enter it.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise LookupServiceError(
            f"cannot make the socket directory {directory}: {error}"
        ) from error
    check_private(directory)


def is_listened_on(path: Path) -> bool:
    """Somebody listens on a socket; also if whoever it is takes no connection now."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(STALE_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def remove_stale_sockets(directory: Path) -> int:
    """Remove sockets that killed workers left behind; returns how many there were.

    One that nobody listens on is stale if it is older than :data:`STALE_AFTER_S`.
    """
    num_removed = 0
    for path in (*directory.glob("*.sock"), *directory.glob("*.ranks")):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= STALE_AFTER_S and not is_listened_on(path):
                path.unlink()
                num_removed += 1
    return num_removed


def check_private(directory: Path) -> None:
    """Check that only this user can enter ``directory``.

    Raises:
        LookupServiceError: it is missing, a link, belongs to somebody else, or others may enter it.
    """
    try:
        info = directory.lstat()
    except OSError as error:
        raise LookupServiceError(f"no socket directory {directory}: {error}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise LookupServiceError(
            f"{directory} must be a directory that only user {os.getuid()} can enter (mode 0700)"
        )
