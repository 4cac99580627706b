"""What every test shares: no thread may outlive the test that started it.

Without vLLM (not every platform has a wheel of it) the folders of its tests leave them out, and
one line of the header says so. The same goes for tests with a marker of :data:`NEEDS` on platforms
that cannot have what they need; where a platform has it, a missing one is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from packaging.requirements import Requirement

from kvkeep.gpu.host_copy import load_rows

hypothesis.settings.register_profile(
    "kvkeep",
    deadline=None,  # the machine may be shared; speed is measured in benchmarks/
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvkeep")

# Whoever is started in the background ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that tests start import ``support``, too.
_paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_paths)

HAS_VLLM = importlib.util.find_spec("vllm") is not None

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())


def is_required(package: str) -> bool:
    """The extra ``test`` installs a package on this platform."""
    wanted = map(Requirement, PROJECT["project"]["optional-dependencies"]["test"])
    return any(
        one.name == package and (one.marker is None or one.marker.evaluate()) for one in wanted
    )


#: Markers of tests that not every platform can run: whether this one can, and what it lacks.
NEEDS = {
    "mooncake": (
        is_required("mooncake-transfer-engine-non-cuda"),
        "this platform has no wheel of Mooncake Store",
    ),
    "debian": (Path("/etc/debian_version").exists(), "this system is no Debian"),
}

#: Threads that libraries keep for the life of the process, by the name of their class.
LIBRARY_THREADS = frozenset({"TMonitor"})
#: How long a thread may take to end after its owner was closed.
END_TIMEOUT_S = 10.0


def pytest_report_header() -> list[str]:
    """Say what is left out."""
    lines = [] if HAS_VLLM else ["vLLM is not installed: its tests are left out"]
    if load_rows() is None:
        lines.append("the copies are not compiled: their tests are left out, numpy's run")
    return lines + [
        f"{lack}: its tests are left out" for can_run, lack in NEEDS.values() if not can_run
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this platform cannot run."""
    lacking = {marker for marker, (can_run, _) in NEEDS.items() if not can_run}
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in lacking)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


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
    started = _alive(before)  # a server that several tests share may start more of them meanwhile
    for thread in started:
        _join(thread, deadline)
    left = [thread for thread in started if thread.is_alive() or thread.ident is None]
    assert not left, "threads left running"


def _join(thread: threading.Thread, deadline: float) -> None:
    """Wait for a thread's end, also if it is only just being started."""
    pause = threading.Event()
    while time.monotonic() < deadline:
        try:
            thread.join(deadline - time.monotonic())
            return
        except RuntimeError:  # it has not begun
            pause.wait(0.01)
