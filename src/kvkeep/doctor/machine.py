"""What the machine is: processor, memory rate, limits of the system and GPUs."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from kvkeep.bench.copies import Memcpy
from kvkeep.bench.measure import cpu_name, seconds
from kvkeep.cli.texts import about_rate, about_size
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe
from kvkeep.gpu.native import LIBRARY, load_rows
from kvkeep.memory.numa import online_nodes

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
