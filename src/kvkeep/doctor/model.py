"""A model's KV: its size, what of it fits into each tier, and whether its layout survives.

The self-test is the one that a worker runs when an engine registers its caches, on a small cache of
the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvkeep.cli.texts import about_size
from kvkeep.codec.frame import HEADER_BYTES
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe
from kvkeep.doctor.memory import pool_bytes
from kvkeep.doctor.model_config import ModelShape
from kvkeep.errors import LayoutError
from kvkeep.gpu.paged import PagedGPUConnector

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
