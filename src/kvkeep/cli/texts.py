"""Sizes, rates, times and ages for people: rounded, in the unit that is short. Pure."""

from __future__ import annotations


def about_size(size_bytes: int) -> str:
    """``1.5 GiB``, ``900 B``."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes} B"


def about_rate(bytes_per_s: float) -> str:
    """``12.3 GB/s``, in powers of ten as makers of memory and disks count."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.{0 if bytes_per_s >= 1e7 else 1}f} MB/s"


def about_time(seconds: float) -> str:
    """``1.25 s``, ``340 ms``, ``12 us``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.{0 if seconds >= 1e-2 else 1}f} ms"
    return f"{seconds * 1e6:.0f} us"


def ago(age_ns: int) -> str:
    """``3 h``; a time in the future, which a clock that was set back makes, is ``now``."""
    seconds = age_ns // 10**9
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return "now"
