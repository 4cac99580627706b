"""Fault 49: importing kvkeep changes nothing in the process."""

from __future__ import annotations

import json
import subprocess
import sys

#: Imports what kvkeep stands on, looks at the process, imports all of kvkeep, and looks again.
PROGRAM = """
import gc, importlib, json, logging, multiprocessing, os, pkgutil, signal, sys, threading, warnings
import numpy, torch, pydantic, yaml, typer, rich.progress, prometheus_client, zmq, msgspec, psutil
import sortedcontainers

def process():
    root = logging.getLogger()
    return {
        "start method": multiprocessing.get_start_method(allow_none=True),
        "garbage collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(),
                              len(gc.callbacks)],
        "signal handlers": [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "environment": dict(os.environ),
        "root logger": [root.level, [str(h) for h in root.handlers], logging.root.manager.disable],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.unraisablehook is
                  sys.__unraisablehook__, threading.excepthook is threading.__excepthook__],
        "warnings": len(warnings.filters),
        "torch": [str(torch.get_default_dtype()), torch.get_num_threads(),
                  torch.is_grad_enabled(), torch.cuda.is_initialized(),
                  torch.are_deterministic_algorithms_enabled()],
        "random numbers": torch.initial_seed(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "recursion limit": sys.getrecursionlimit(),
        "metrics": len(list(prometheus_client.REGISTRY.collect())),
        "directory": os.getcwd(),
        "umask": [mask := os.umask(0), os.umask(mask)][0],
        "child processes": len(psutil.Process().children()),
        "open files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
    }

def modules(package="kvkeep"):
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        yield found
        if found.ispkg and found.name != "kvkeep.connectors.vllm":
            yield from modules(found.name)

# Each needs the library of its store, and is imported where a URL names that store.
CONNECTORS = {"kvkeep.backends.remote." + name for name in (
    "mooncake", "object_store", "redis_connector", "redis_servers")}

before = process()
names = ["kvkeep"]
for found in modules():
    # connectors.vllm is imported by a running vLLM; importing it imports vLLM, which does change
    # the process. A __main__ is there to be run.
    if found.name in CONNECTORS:
        CONNECTORS.remove(found.name)
    elif found.name != "kvkeep.connectors.vllm" and not found.name.endswith("__main__"):
        names.append(found.name)
after = None
for name in names:
    importlib.import_module(name)
    after = process()
    if after != before:
        changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
        print(json.dumps({"module": name, "changed": changed}))
        break
else:
    extras = ("vllm", "transformers", "redis", "obstore", "mooncake", "opentelemetry", "matplotlib",
              "plotext", "google_crc32c")
    optional = [name for name in extras if name in sys.modules]
    print(json.dumps({"imported": len(names), "optional": optional, "gone": list(CONNECTORS)}))
"""


def test_importing_every_module_changes_nothing():
    """Fault 49: start method, collector, signal handlers, environment, loggers, threads, torch."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout.splitlines()[-1])
    assert "changed" not in answer, answer
    assert answer["imported"] > 10
    assert answer["gone"] == [], "a connector that this test leaves out has another name now"
    assert answer["optional"] == [], "optional packages are imported where they are used"
    assert run.stdout.count("\n") == 1, "importing printed something"
