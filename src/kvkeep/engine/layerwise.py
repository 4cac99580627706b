"""store_layer and retrieve_layer: the generators that move one layer per ``next()``.

Driven by the engine's thread. They keep one protocol in every state (spec 1.7): ``store_layers``
yields num_layers + 1 times, ``retrieve_layers`` num_layers + 2 times. A generator that is dropped
waits for the copy that is under way, gives back all it held, and nothing of it becomes visible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

import torch

from kvkeep.engine.load import LoadOp, refuse_load
from kvkeep.engine.removal import Remover, TaggedKeys
from kvkeep.engine.request import COPY_ERRORS, EngineParts, Request
from kvkeep.engine.results import StoreStop
from kvkeep.engine.store import StoreOp, refuse_store
from kvkeep.gpu.threads import CopyThreads

#: What ``retrieve_layers`` yields: the number of tokens found, None per layer, the mask.
LoadStep = int | torch.Tensor | None


def store_layers(
    parts: EngineParts,
    request: Request,
    refusal: Callable[[], StoreStop | None],
    behind: CopyThreads | None,
    tagged: TaggedKeys,
) -> Generator[None, None, None]:
    """Store layer by layer; see :meth:`kvkeep.engine.engine.CacheEngine.store_layer`.

    Args:
        parts: of the engine.
        request: what to store.
        refusal: why nothing is stored now, or None; asked by the first ``next()``.
        behind: copies a layer while the caller goes on with the next one; None copies it at once.
        tagged: where committed chunks are noted.
    """
    num_layers = parts.gpu_connector.layout.num_layers
    refused = refusal()
    if refused is not None:
        refuse_store(parts, request, refused)
        yield from [None] * (num_layers + 1)
        return
    with StoreOp(parts, request) as store:
        copier = store.copy_layers()
        if copier is not None and behind is not None:
            copier = behind.behind(num_layers, copier)
        try:
            yield
            for layer in range(num_layers):
                started = time.perf_counter()
                if copier is not None:
                    try:
                        next(copier)
                        if layer == num_layers - 1:
                            next(copier, None)  # the last layer is complete when the copier ends
                    except COPY_ERRORS as error:
                        store.fail(error)
                        copier = None
                store.spent(time.perf_counter() - started)
                if layer == num_layers - 1:
                    store.commit()
                    tagged.note(request.scope.tags, store.copied_keys)
                yield
        finally:
            if copier is not None:
                copier.close()


def retrieve_layers(
    parts: EngineParts,
    request: Request,
    is_healthy: Callable[[], bool],
    tagged: TaggedKeys,
    remover: Remover | None,
) -> Generator[LoadStep, None, None]:
    """Load layer by layer; see :meth:`kvkeep.engine.engine.CacheEngine.retrieve_layer`."""
    num_layers = parts.gpu_connector.layout.num_layers
    if not is_healthy():
        mask = refuse_load(parts, request)
        yield 0
        yield from [None] * num_layers
        yield mask
        return
    with LoadOp(parts, request) as load:
        written = len(load.keys)
        copier = load.copy_layers()
        seconds = 0.0
        try:
            yield load.num_found
            for _ in range(num_layers):
                started = time.perf_counter()
                if copier is not None:
                    try:
                        next(copier)
                    except COPY_ERRORS as error:
                        copier = None
                        written = load.copy_singly(error)  # all layers: the rest has come early
                seconds += time.perf_counter() - started
                yield None
        finally:
            if copier is not None:
                copier.close()
        written = load.conclude(written)
        if written:
            load.count(written, seconds)
        mask = load.mask(written)
    load.settle(written, tagged, remover)
    yield mask
