"""One request to an engine, and the parts of an engine that serve it: plain values.

Between ``engine.py``, which makes them, and ``storing.py``, ``loading.py`` and ``layerwise.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvkeep.gpu.base import GPUConnectorInterface, KVCaches
from kvkeep.metrics import Metrics
from kvkeep.ranks.base import RankGroup
from kvkeep.storage.manager import StorageManager
from kvkeep.tokens import ChunkedTokenDatabase, RequestScope, make_scope

#: What a copy between engine memory and the pool raises when the device or the system fails. A
#: ValueError is the caller's mistake and is his to see.
COPY_ERRORS = (RuntimeError, OSError, MemoryError)

#: Name of the engine's memory where failures are counted.
ENGINE_MEMORY = "engine"


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a CacheEngine joins.

    Attributes:
        token_database: cuts and names.
        gpu_connector: copies.
        storage_manager: keeps.
        metrics: counts.
        ranks: those that load together with this one; None for an engine of one rank.
    """

    token_database: ChunkedTokenDatabase
    gpu_connector: GPUConnectorInterface
    storage_manager: StorageManager
    metrics: Metrics
    ranks: RankGroup | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments that store and retrieve share; see :class:`kvkeep.engine.CacheEngine`."""

    tokens: object
    mask: object
    kvcaches: KVCaches | None
    slot_mapping: torch.Tensor | None
    offset: int
    req_id: str | None
    scope: RequestScope


def merge_scope(scope: RequestScope, request_configs: Mapping[str, object] | None) -> RequestScope:
    """``scope`` with the tags of ``request_configs``, which win over tags of the same name."""
    if not request_configs:
        return scope
    tags = dict(scope.tags)
    tags.update(make_scope(request_configs=request_configs).tags)
    return replace(scope, tags=tuple(sorted(tags.items())))
