"""Home cores: the threads of a pool begin their loads on different cores.

The system wakes a thread on the core of whoever wakes it, and moves threads apart some milliseconds
later, which is as long as a load from the page cache takes: on two cores, four threads that were
woken together read no faster than one. So a thread goes to a core of its own before it loads. It is
not held there.
"""

from __future__ import annotations

import contextlib
import os


def go_home(index: int, num_threads: int) -> None:
    """Move the calling thread to the core that belongs to it, if it is not there.

    Does nothing where there are more cores than threads, since the system finds a free one then,
    and where it does not let threads choose.

    Args:
        index: of the thread in its pool.
        num_threads: in the pool.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = os.sched_getaffinity(0)
    if not 1 < len(cores) <= num_threads:
        return
    with contextlib.suppress(OSError):  # the cores were taken away: a load must not fail for that
        os.sched_setaffinity(0, {sorted(cores)[index % len(cores)]})
        os.sched_setaffinity(0, cores)
