"""What kvkeep needs to know of a vLLM request: its token ids so far and its RequestScope.

Scheduler process only, from the scheduler's thread.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.keys import Extra
from kvkeep.results import FoundTokens
from kvkeep.tokens import RequestScope, as_token_bytes, make_scope

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that it is shown


@dataclass(slots=True)
class TrackedRequest:
    """One living request.

    Attributes:
        request: the engine's own object.
        scope: what it adds to the identity; None if its KV cannot be named, so it is left alone.
        saved: leading tokens that were found stored or offered for storing.
        may_load: False if a load for which it waited has failed.
        may_store: False if it may have computed on KV that was never loaded.
        was_asked: its lookup has been counted in the hit rate.
        found: what its last lookup found.
        found_after: tokens that the engine had itself at that time.
    """

    request: Request
    scope: RequestScope | None
    saved: int = 0
    may_load: bool = True
    may_store: bool = True
    was_asked: bool = False
    found: FoundTokens = field(default_factory=FoundTokens)
    found_after: int = 0
    _ids: array[int] = field(default_factory=lambda: array("I"))

    def token_bytes(self, num_tokens: int) -> bytes:
        """The first ``num_tokens`` ids as little-endian uint32.

        Raises:
            OverflowError: an id is negative or too wide.
        """
        request = self.request
        if request.resumable or len(self._ids) > request.num_tokens:
            self._ids = array("I")  # a session's tokens may be rewritten between its turns
        if len(self._ids) < num_tokens:
            self._ids.extend(request.all_token_ids[len(self._ids) : num_tokens])
        return as_token_bytes(self._ids[:num_tokens])


class LoraNames:
    """Names of LoRA adapters that tell two adapters apart, whatever they are called.

    The fingerprint is taken when an adapter is first seen, which is when the engine loads it.
    """

    def __init__(self) -> None:
        """Know no adapter yet."""
        self._names: dict[tuple[int, str, str], str | None] = {}

    def name_of(self, lora: LoRARequest) -> str | None:
        """Name and fingerprint, or None if the adapter has none that lasts.

        That is so if its files cannot be read here, or if it was ever loaded in place of another.
        """
        key = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        if lora.load_inplace:
            self._names[key] = None  # its weights change under requests that run
        if key not in self._names:
            fingerprint = fingerprint_adapter(Path(lora.lora_path))
            if fingerprint is None:
                logger.warning(
                    "adapter %s has no readable files at %s; its requests are not cached",
                    lora.lora_name,
                    lora.lora_path,
                )
            self._names[key] = fingerprint and f"{lora.lora_name}@{fingerprint}"
        return self._names[key]


def fingerprint_adapter(directory: Path) -> str | None:
    """The hash of an adapter's config and weights, or None if there are none."""
    digest = hashlib.sha256()
    try:
        files = sorted(
            path
            for path in directory.iterdir()
            if path.is_file() and path.suffix in (".json", ".safetensors", ".bin", ".pt")
        )
        for path in files:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return None
    return digest.hexdigest() if files else None


def scope_of(request: Request, loras: LoraNames) -> RequestScope | None:
    """What ``request`` adds to the identity.

    Returns:
        None if its KV depends on something that has no name: prompt embeddings, a pooling task,
        an adapter without a lasting name, an image without a hash.
    """
    if request.prompt_embeds is not None or request.pooling_params is not None:
        return None
    lora = ""
    if request.lora_request is not None:
        named = loras.name_of(request.lora_request)
        if named is None:
            return None
        lora = named
    extras: list[Extra] = []
    for feature in request.mm_features:
        if not feature.identifier and not feature.mm_hash:
            return None
        content = f"{feature.modality}\0{feature.identifier}\0{feature.mm_hash or ''}"
        extras.append(Extra(feature.mm_position.offset, content))
    return make_scope(
        salt=request.cache_salt or "",
        lora=lora,
        request_configs=request.kv_transfer_params,
        extras=sorted(extras),
    )
