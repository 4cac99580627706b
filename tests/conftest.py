"""What every test shares: no thread may outlive the test that started it.

Without vLLM (not every platform has a wheel of it) the folders of its tests leave them out, and
one line of the header says so.
"""

from __future__ import annotations

import importlib.util
import signal
import threading
import time
from collections.abc import Iterator

import hypothesis
import pytest

from kvkeep.gpu.native import load_rows

hypothesis.settings.register_profile(
    "kvkeep",
    deadline=None,  # the machine may be shared; speed is measured in benchmarks/
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvkeep")

# Whoever is started in the background ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_VLLM = importlib.util.find_spec("vllm") is not None

#: Threads that libraries keep for the life of the process, by the name of their class.
LIBRARY_THREADS = frozenset({"TMonitor"})
#: How long a thread may take to end after its owner was closed.
END_TIMEOUT_S = 10.0


def pytest_report_header() -> list[str]:
    """Say what is left out."""
    lines = [] if HAS_VLLM else ["vLLM is not installed: its tests are left out"]
    if load_rows() is None:
        lines.append("the copies are not compiled: their tests are left out, numpy's run")
    return lines


def _alive(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before and type(thread).__name__ not in LIBRARY_THREADS
    ]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail the test if a thread that it started is still alive afterwards."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + END_TIMEOUT_S
    for thread in _alive(before):
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not _alive(before), "threads left running"
