"""Huge pages: asks the system for them, and says what it answered.

Called once, when an arena is made.
"""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

from kvkeep.memory.report import Choice

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
