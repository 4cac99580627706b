"""What kvkeep needs to know of a vLLM request: its token ids so far and its RequestScope.

Scheduler process only, from the scheduler's thread.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import uuid
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.engine.results import FoundTokens
from kvkeep.hashing import Extra
from kvkeep.tokens import RequestScope, as_token_bytes, make_scope

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that it is shown

#: Bytes of what clients choose, beyond which its hash takes its place, and tags of a request.
MAX_TEXT, MAX_TAGS = 1000, 100
#: What vLLM's hashes of inputs look like: blake3, SHA-256 or SHA-512 in hex.
_CONTENT_HASH = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")


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


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter as it was when it was first seen, which is when the engine loads it.

    Attributes:
        name: what it is called.
        path: its folder.
        files: name, size, inode and times of its files.
        text: name and fingerprint, None without readable files.
    """

    name: str
    path: str
    files: tuple[tuple[str | int, ...], ...]
    text: str | None


class LoraNames:
    """Names of LoRA adapters that tell two adapters apart, whatever they are called.

    vLLM knows an adapter by its number: it loads it once, and again whenever it had to make room
    for others. So a number stands for the files that it was first seen with; where it is seen with
    others, nobody knows any more which of them the engine has.
    """

    def __init__(self, settings: str = "") -> None:
        """Know no adapter yet.

        Args:
            settings: how this engine applies adapters; part of every name.
        """
        self._settings = settings
        self._adapters: dict[int, _Adapter] = {}
        self._unsure: set[int] = set()

    def name_of(self, lora: LoRARequest) -> str | None:
        """Name and fingerprint, or None if the adapter has none that lasts.

        That is so if its files cannot be read here or have changed since they were first seen, if
        its number is that of another adapter, too, or if it was ever loaded in place of another.
        """
        number, path = lora.lora_int_id, Path(lora.lora_path)
        files = adapter_files(path)
        known = self._adapters.get(number)
        if known is None:
            fingerprint = fingerprint_adapter(path)
            if fingerprint is None:
                logger.warning(
                    "adapter %s has no readable files at %s; its requests are not cached",
                    lora.lora_name,
                    lora.lora_path,
                )
            kind = f"{self._settings};3d={lora.is_3d_lora_weight}"
            text = fingerprint and f"{lora.lora_name}@{fingerprint};{kind}"
            known = _Adapter(lora.lora_name, lora.lora_path, files, text)
            self._adapters[number] = known
        is_the_same = (lora.lora_name, lora.lora_path, files) == (
            known.name,
            known.path,
            known.files,
        )
        if lora.load_inplace or not is_the_same:
            if number not in self._unsure:
                logger.warning(
                    "adapter %s (%d) is not what it was; its requests are not cached any more",
                    lora.lora_name,
                    number,
                )
            self._unsure.add(number)
        return None if number in self._unsure else known.text


def adapter_files(directory: Path) -> tuple[tuple[str | int, ...], ...]:
    """What changes when a file of an adapter does, read without its content."""
    try:
        stats = [(path.name, path.stat()) for path in sorted(directory.iterdir())]
    except OSError:
        return ()
    return tuple(
        (name, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
        for name, stat in stats
    )


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


def scope_of(
    request: Request, loras: LoraNames, *, inputs_are_hashed: bool = True
) -> RequestScope | None:
    """What ``request`` adds to the identity.

    An image whose name is not the hash of its content (a client gave it, or vLLM only counts) means
    something else in another process, so what depends on it is found in this one only.

    Args:
        request: a request of vLLM.
        loras: names adapters.
        inputs_are_hashed: vLLM names images by their content.

    Returns:
        None if its KV depends on something that has no name: prompt embeddings, a pooling task,
        an adapter without a lasting name, an image without a hash; or if it has too many tags.
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
        name = feature.mm_hash or feature.identifier
        inputs_are_hashed = inputs_are_hashed and bool(_CONTENT_HASH.fullmatch(name))
        content = f"{feature.modality}\0{feature.identifier}\0{feature.mm_hash or ''}"
        extras.append(Extra(feature.mm_position.offset, content))
    scope = make_scope(
        salt=_bounded(request.cache_salt or ""),
        lora=_bounded(lora),
        request_configs=request.kv_transfer_params,
        extras=sorted(Extra(place, _bounded(content)) for place, content in extras),
    )
    if len(scope.tags) > MAX_TAGS:
        return None
    scope = replace(
        scope, tags=tuple((_bounded(name), _bounded(text)) for name, text in scope.tags)
    )
    if extras and not inputs_are_hashed:
        return replace(scope, tags=tuple(sorted((*scope.tags, _own_tag(os.getpid())))))
    return scope


def _bounded(text: str) -> str:
    """A text that clients choose: as it is, or its hash where it is long or no Unicode text."""
    content = text.encode("utf-8", "surrogatepass")
    if len(content) <= MAX_TEXT and content == text.encode("utf-8", "replace"):
        return text
    return f"hash\0{len(content)}\0{hashlib.sha256(content).hexdigest()}"


@functools.lru_cache(1)
def _own_tag(pid: int) -> tuple[str, str]:
    """A tag that no other process has, nor this one after a restart."""
    return f"inputs of {pid} {uuid.uuid4()}", ""
