"""Huge pages: asks the system for them, and says what it answered.

Called once, when an arena is made or an engine's caches are registered.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from kvkeep.memory.report import Choice

#: Size of a huge page, and a multiple of it elsewhere than on x86-64.
HUGE_PAGE_BYTES = 2 << 20

#: Topic of the choice made here.
TOPIC = "huge pages"
_SYSFS = Path("/sys")


def ask_for_huge_pages(
    mapping: mmap.mmap, *, is_shared: bool, wanted: bool, sysfs: Path = _SYSFS
) -> Choice:
    """Ask for transparent huge pages for a whole mapping.

    Args:
        mapping: the memory; nothing of it is committed yet.
        is_shared: it is shared memory, for which the system has a switch of its own.
        wanted: by the settings.
        sysfs: where the system describes itself.
    """
    if not wanted:
        return Choice(TOPIC, "not asked for", "as set")
    if sys.platform != "linux":
        return Choice(TOPIC, "no", f"{sys.platform} gives none on request")
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # the kernel is built without
        return Choice(TOPIC, "no", f"the system refuses: {error.strerror}")
    name = "shmem_enabled" if is_shared else "enabled"
    try:
        text = (sysfs / "kernel/mm/transparent_hugepage" / name).read_text()
    except OSError:
        return Choice(TOPIC, "asked for", "the system does not say whether it gives any")
    found = re.search(r"\[(\w+)\]", text)
    mode = found[1] if found else "unknown"
    granted = mode in ("always", "madvise", "within_size", "advise", "force")
    return Choice(TOPIC, "yes" if granted else "no", f"the system's switch {name} is {mode!r}")


def advise_huge_pages(ranges: Mapping[int, int]) -> int:
    """Ask for huge pages for memory of somebody else; what is committed already stays as it is.

    It is advice: the content does not change, and a system that has none, or refuses, is no error.

    Args:
        ranges: number of bytes by address. Whole huge pages inside of them are asked for.

    Returns:
        Bytes for which the system took the advice.
    """
    if sys.platform != "linux":
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    taken = 0
    for address, num_bytes in ranges.items():
        start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        size = (address + num_bytes - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if size > 0 and madvise(start, size, mmap.MADV_HUGEPAGE) == 0:
            taken += size
    return taken
