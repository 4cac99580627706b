"""The pool that these settings would make here, and whether the machine can give it.

The pool is really opened, as a worker opens its own, and closed again: nothing of it is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch

from kvkeep.cli.texts import about_size
from kvkeep.config.units import format_size
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe
from kvkeep.errors import ConfigError
from kvkeep.memory.huge_pages import TOPIC as HUGE_PAGES
from kvkeep.memory.numa import TOPIC as NUMA
from kvkeep.memory.report import AllocatorReport
from kvkeep.memory.sizing import available_bytes
from kvkeep.opening_pool import open_pool

#: Without a model, slots are as large as those of 256 tokens of an 8B model.
_SOME_CHUNK_BYTES = 32 << 20
#: Of the available memory, what a pool can have without getting in the engine's way.
_GOOD_SHARE, _MOST_SHARE = 0.7, 0.9


def pool(patient: Patient) -> Sequence[Finding]:
    """Memory, the pool out of it, and what was chosen for it."""
    available, total = available_bytes(), psutil.virtual_memory().total
    memory = Finding(
        "available",
        f"{about_size(available)} of {about_size(total)}",
        values={"available_bytes": available, "total_bytes": total},
    )
    cpu = patient.settings.cpu
    ranks = patient.num_ranks
    if cpu.size is not None and cpu.size * ranks > available:
        return [memory, _too_large(cpu.size, available // ranks)]
    place = replace(patient.place, cuda_device=0 if torch.cuda.is_available() else None)
    try:
        # a running engine may have shared memory of that name
        allocator, report = open_pool(
            cpu.model_copy(update={"shared_name": None}), place, _chunk_bytes(patient)
        )
    except ConfigError as error:
        advice = Advice("Change the settings of cpu.")
        return [memory, Finding("pool", str(error), Level.ERROR, advice)]
    allocator.close()
    return [memory, _size(patient, report, available // ranks), *_choices(report)]


def pool_bytes(patient: Patient) -> int:
    """Size of the pool that a worker would have, without its byte buffers."""
    cpu = patient.settings.cpu
    allocator, report = open_pool(
        cpu.model_copy(update={"shared_name": None}), patient.place, _chunk_bytes(patient)
    )
    allocator.close()
    return report.size_bytes - (0 if cpu.allocator == "paged" else cpu.buffers)


def _chunk_bytes(patient: Patient) -> int:
    if patient.model is None:
        return _SOME_CHUNK_BYTES
    return patient.settings.chunk_size * patient.model.token_bytes


def _too_large(size: int, available: int) -> Finding:
    fitting = format_size(max(1, int(available * _GOOD_SHARE)) >> 30 << 30 or 512 << 20)
    advice = Advice(
        f"Make the pool smaller than the {about_size(available)} that each rank can have.",
        f"cpu.size: {fitting}",
    )
    text = f"{about_size(size)} are set, {about_size(available)} are available"
    return Finding("pool", text, Level.ERROR, advice, {"bytes": size})


def _size(patient: Patient, report: AllocatorReport, available: int) -> Finding:
    size = report.size_bytes
    why = report.choice("size").why
    values = {"bytes": size, "why": why, "report": report.lines()}
    each = "" if patient.num_ranks == 1 else f"on each of {patient.num_ranks} ranks, "
    text = f"{each}{about_size(size)} ({why})"
    good = format_size(int(available * _GOOD_SHARE) >> 30 << 30)
    if size > available * _MOST_SHARE:
        advice = Advice(
            "Leave the engine memory of its own: this pool is nearly all that is available.",
            f"cpu.size: {good}",
        )
        return Finding("pool", text, Level.WARNING, advice, values)
    if patient.settings.cpu.size is None and available * _GOOD_SHARE > size + (2 << 30):
        advice = Advice(
            "Give the pool more, if the engine and others do not need that memory.",
            f"cpu.size: {good}",
        )
        return Finding("pool", text, Level.NOTE, advice, values)
    return Finding("pool", text, values=values)


def _choices(report: AllocatorReport) -> list[Finding]:
    """What the system gave the pool."""
    topics = [HUGE_PAGES]
    if torch.cuda.is_available():
        topics += [NUMA, "pinned memory"]
    findings = []
    for choice in report.choices:
        if choice.topic not in topics:
            continue
        text = f"{choice.chosen} ({choice.why})"
        if choice.topic == HUGE_PAGES and choice.chosen == "no":
            advice = Advice(
                "Let programs ask for huge pages: copies are faster with them.",
                "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            )
            findings.append(Finding(choice.topic, text, Level.NOTE, advice))
        else:
            findings.append(Finding(choice.topic, text))
    return findings


MEMORY_PROBES = (Probe("memory", "pool", pool, deadline_s=10.0),)
