"""A model's KV: its size, what of it fits into each tier, and whether its layout survives.

The self-test is the one that a worker runs when an engine registers its caches, on a small cache of
the same layout.

The pool that these settings would make here, and whether the machine can give it.

The pool is really opened, as a worker opens its own, and closed again: nothing of it is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch

from kvkeep.cli.output import about_size
from kvkeep.codec.frame import HEADER_BYTES
from kvkeep.config.base import format_size
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe
from kvkeep.doctor.model_config import ModelShape
from kvkeep.engine.build import open_pool
from kvkeep.errors import ConfigError, LayoutError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.memory.placement import HUGE_PAGES_TOPIC as HUGE_PAGES
from kvkeep.memory.placement import NUMA_TOPIC as NUMA
from kvkeep.memory.placement import AllocatorReport, available_bytes

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


#: Tokens in a page: what vLLM takes on GPUs, and on CPUs.
_GPU_PAGE, _CPU_PAGE = 16, 128
#: Pages of the cache that the self-test runs on.
_TEST_PAGES = 8


def model(patient: Patient) -> Sequence[Finding]:
    """Size and layout of the model's KV."""
    shape = patient.model
    if shape is None:
        return []
    kind = "KV heads" if shape.has_values else "latent"
    heads = f"{shape.num_kv_heads} {kind} of" if shape.has_values else "a latent of"
    text = (
        f"{shape.name}: {shape.num_layers} layers, {heads} {shape.head_size}, {shape.dtype}; "
        f"{about_size(shape.token_bytes)} per token"
    )
    if patient.num_ranks > 1:
        text += f" on each of {patient.num_ranks} ranks"
    values = {
        "name": shape.name,
        "layers": shape.num_layers,
        "kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "dtype": shape.dtype,
        "token_bytes": shape.token_bytes,
    }
    findings = [Finding("model", text, values=values)]
    if shape.other_layers:
        kinds = ", ".join(shape.other_layers)
        text = f"this model has layers of other kinds than full attention: {kinds}"
        advice = Advice("Use another model: kvkeep refuses hybrid ones, whose KV it cannot keep.")
        return [*findings, Finding("layers", text, Level.ERROR, advice)]
    return [*findings, _chunk(patient, shape), *_capacities(patient, shape)]


def self_test(patient: Patient) -> Sequence[Finding]:
    """Store, wipe and load pages of the model's layout."""
    if patient.model is None or patient.model.other_layers:
        return []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = patient.model.layout(_GPU_PAGE if device.type == "cuda" else _CPU_PAGE)
    connector = PagedGPUConnector(layout)
    page_bytes = layout.groups[0].layer_page_bytes
    pages = [
        torch.zeros((_TEST_PAGES, page_bytes), dtype=torch.uint8, device=device)
        for _ in range(layout.num_layers)
    ]
    try:
        connector.register_kv_caches(pages)
    except LayoutError as error:
        return [Finding("self-test", str(error), Level.ERROR)]
    finally:
        connector.close()
    where = f"{about_size(page_bytes)} per page and layer, on the {device.type.upper()}"
    return [Finding("self-test", f"pages survive a store, a wipe and a load ({where})")]


def _chunk(patient: Patient, shape: ModelShape) -> Finding:
    tokens = patient.settings.chunk_size
    size = tokens * shape.token_bytes
    text = f"{tokens:,} tokens, {about_size(size)}"
    values = {"tokens": tokens, "bytes": size}
    if tokens % _GPU_PAGE:
        fitting = -(-tokens // _GPU_PAGE) * _GPU_PAGE
        advice = Advice(
            "Make the chunk size a multiple of the engine's page (block) size, "
            f"which is {_GPU_PAGE} in vLLM on GPUs and {_CPU_PAGE} on CPUs.",
            f"chunk_size: {fitting}",
        )
        return Finding("chunk", text, Level.ERROR, advice, values)
    return Finding("chunk", text, values=values)


def _capacities(patient: Patient, shape: ModelShape) -> list[Finding]:
    """How many tokens fit into each tier."""
    chunk = patient.settings.chunk_size * shape.token_bytes
    pool = pool_bytes(patient)
    chunks = pool // chunk
    tokens = chunks * patient.settings.chunk_size
    values = {"tokens": tokens, "chunks": chunks}
    text = f"{tokens:,} tokens fit ({chunks:,} chunks)"
    if chunks == 0:
        advice = Advice(
            f"Make the pool larger than one chunk of this model, {about_size(chunk)}; "
            "hundreds of chunks are usual.",
            f"cpu.size: {-(-64 * chunk >> 30)}GiB",
        )
        findings = [Finding("in memory", text, Level.ERROR, advice, values)]
    else:
        findings = [Finding("in memory", text, values=values)]
    disk = patient.settings.disk
    if disk.path is not None:
        chunks = disk.size // (chunk + HEADER_BYTES)
        text = f"{chunks * patient.settings.chunk_size:,} tokens fit ({chunks:,} chunks)"
        values = {"tokens": chunks * patient.settings.chunk_size, "chunks": chunks}
        too_small = Advice(
            f"Make disk.size larger than one chunk of this model, {about_size(chunk)}.",
            f"disk.size: {-(-64 * chunk >> 30)}GiB",
        )
        one = Finding("on disk", text, values=values)
        findings.append(one if chunks else replace(one, level=Level.WARNING, advice=too_small))
    return findings


MODEL_PROBES = (
    Probe("model", "model", model),
    Probe("model", "self-test", self_test, deadline_s=30.0),
)
