"""The folder of the demo's disk tier: a temporary one, or one that the user wants to keep.

Called from the demo's own process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvkeep.errors import ConfigError

#: Where large temporary files belong. The usual folder is often in memory, and no disk.
LARGE_TEMPORARY = Path("/var/tmp")
#: How long a lookup of the demo may read from the disk before it answers with less.
LOOKUP_TIMEOUT = "10s"


@contextmanager
def disk_folder(given: Path | None) -> Iterator[Path]:
    """The folder, made if need be; a temporary one is removed at the end, whatever happens.

    Args:
        given: the user's; None for a temporary one.

    Raises:
        ConfigError: the folder cannot be made.
    """
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot use {given} for the disk tier: {error}") from error
        yield given.resolve()
        return
    parent = temporary_parent(os.environ)
    with tempfile.TemporaryDirectory(
        prefix="kvkeep-demo-", dir=parent, ignore_cleanup_errors=True
    ) as made:
        yield Path(made)


def temporary_parent(env: Mapping[str, str]) -> Path:
    """Where temporary folders are made: ``TMPDIR``, or else a folder that is on a disk."""
    if "TMPDIR" not in env and os.access(LARGE_TEMPORARY, os.W_OK | os.X_OK):
        return LARGE_TEMPORARY
    return Path(tempfile.gettempdir())


def disk_settings(folder: str) -> dict[str, Any]:
    """The settings, by name, that switch the disk tier on."""
    return {"disk.path": folder, "lookup.timeout": LOOKUP_TIMEOUT}


def leave_page_cache(folder: Path) -> None:
    """Have the system write the chunks to the disk and forget them, where it can be asked to.

    Without this, what was just written would be read out of the system's memory again.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*.kvc"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
