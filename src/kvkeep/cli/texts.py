"""Sizes and ages for people: rounded, in the unit that leaves a short number. Pure."""

from __future__ import annotations


def about_size(size_bytes: int) -> str:
    """``1.5 GiB``, ``900 B``."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes} B"


def ago(age_ns: int) -> str:
    """``3 h``; a time in the future, which a clock that was set back makes, is ``now``."""
    seconds = age_ns // 10**9
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return "now"
