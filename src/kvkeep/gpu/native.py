"""RowCopier: the compiled copies of rows (``_rows.c``), where the installation has them.

The library is built when kvkeep is installed (``scripts/build_rows.py``); without a C compiler
there is none, and numpy copies (``host.py``). It is loaded once, at the first transfer. A copier
may be used from any thread, and the interpreter's lock is free while it copies.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

#: Its second dot keeps Python from taking it for a module.
LIBRARY = Path(__file__).with_name("_rows.native.so")
#: VERSION in ``_rows.c``.
VERSION = 1

#: Addresses as numbers; below 2**63 for programs on every system.
Addresses = npt.NDArray[np.int64]


class How(IntEnum):
    """How rows are copied, as ``_rows.c`` numbers it."""

    PLAIN = 0
    """With ``memcpy``: what was written is in the cache afterwards."""
    STREAM = 1
    """Past the caches, one row after the other."""
    STREAM_FOUR = 2
    """Past the caches, four rows at a time."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a row consists of.

    Attributes:
        count: pieces in a row.
        num_bytes: bytes of each.
        to_step: bytes from one to the next where they are written.
        from_step: the same where they are read.
    """

    count: int
    num_bytes: int
    to_step: int
    from_step: int


class RowCopier:
    """The library. It believes its arguments: who calls it has checked that all is in bounds."""

    def __init__(self, path: Path = LIBRARY) -> None:
        """Load the library.

        Raises:
            OSError: there is none, or it is no library for this machine.
            ValueError: it was built from another version of its source.
        """
        library = ctypes.CDLL(str(path))
        try:
            version = int(library.kvkeep_rows_version())
        except AttributeError:
            version = 0
        if version != VERSION:
            raise ValueError(f"{path} has version {version}, version {VERSION} is needed")
        self._copy = library.kvkeep_copy_rows
        size = ctypes.c_size_t
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *5 * (size,), ctypes.c_int)
        self._copy.restype = None

    def copy(self, to: Addresses, source: Addresses, pieces: Pieces, how: How) -> None:
        """Copy rows; complete on return, and visible to other threads.

        Args:
            to: where each row begins that is written, contiguous.
            source: where each row begins that is read, contiguous and as long.
            pieces: what each row consists of.
            how: the way.

        Raises:
            ValueError: the arrays are not as long as each other, or not contiguous.
        """
        if len(to) != len(source) or not (to.flags.c_contiguous and source.flags.c_contiguous):
            raise ValueError(f"{len(to)} and {len(source)} rows, or addresses that are apart")
        self._copy(
            to.ctypes.data,
            source.ctypes.data,
            len(to),
            pieces.num_bytes,
            pieces.count,
            pieces.to_step,
            pieces.from_step,
            how,
        )


@functools.cache
def load_rows() -> RowCopier | None:
    """The library of this installation, or None; says once in the log why there is none."""
    if not LIBRARY.exists():
        logger.info(
            "copies between the engine's memory and the pool are numpy's: kvkeep was installed "
            "without a C compiler; with one they are faster"
        )
        return None
    try:
        return RowCopier()
    except (OSError, ValueError) as error:
        logger.warning(
            "copies between the engine's memory and the pool are numpy's, the compiled ones do not "
            "load (%s); install kvkeep again",
            error,
        )
        return None
