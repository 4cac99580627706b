"""CacheIdentity of a vLLM worker: which model, which weights, which settings of both.

Called once per worker. A model from the hub is named by its commit; a local one by its files'
content, since a folder's name says nothing about what is in it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.config import IdentitySettings
from kvkeep.connectors.vllm.kv_settings import (
    FILE_LOAD_FORMATS,
    as_text,
    engine_facts,
    load_format_of,
)
from kvkeep.errors import IdentityError
from kvkeep.identity import CacheIdentity
from kvkeep.layout import KVLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Files of a model folder that its KV can depend on.
MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
#: Up to this size all bytes of a folder are hashed; beyond it, samples together with file times.
FULL_HASH_BYTES = 2 << 30
#: Bytes of one sample, and samples per file.
SAMPLE_BYTES, NUM_SAMPLES = 64 << 10, 64
#: Config entries on which KV does not depend.
IGNORED_CONFIG = frozenset({"_name_or_path", "transformers_version", "id2label", "label2id"})


def worker_identity(
    vllm_config: VllmConfig,
    layout: KVLayout,
    *,
    chunk_size: int,
    settings: IdentitySettings,
    is_same_on_all_ranks: bool = False,
) -> CacheIdentity:
    """What this worker's KV belongs to.

    Args:
        vllm_config: the engine's configuration.
        layout: the declared layout.
        chunk_size: tokens in a chunk.
        settings: names that the user gives.
        is_same_on_all_ranks: the KV is, so that a rank is no part of the identity.

    Raises:
        IdentityError: nothing tells this model's weights from others' of the same name.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    revision = settings.revision or weights_revision(vllm_config)
    return CacheIdentity(
        model=settings.model or model.model,
        revision=f"{revision};config={config_digest(vllm_config)}",
        layout=layout,
        chunk_size=chunk_size,
        rank=0 if is_same_on_all_ranks else parallel.rank,
        world_size=1 if is_same_on_all_ranks else parallel.world_size,
        tags=settings.tags,
    )


def weights_revision(vllm_config: VllmConfig) -> str:
    """The hub's commit of the weights, or a fingerprint of a local model's files.

    Dummy weights are this engine's alone.

    Raises:
        IdentityError: neither can be had.
    """
    model = vllm_config.model_config
    load_format = load_format_of(vllm_config)
    if load_format == "dummy":  # others come later, from whoever trains them, say
        transfer = vllm_config.kv_transfer_config
        engine = transfer.engine_id if transfer is not None else ""
        return f"dummy:{model.seed}:{vllm_config.instance_id}:{engine}"
    path = Path(model.model)
    is_read_from_files = load_format in FILE_LOAD_FORMATS and not model.model_weights
    if is_read_from_files and path.exists():
        return fingerprint_files(path)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if is_read_from_files and commit and model.hf_config_path is None:
        return f"commit:{commit}"
    raise IdentityError(
        f"nothing tells the weights of {model.model}, loaded as {load_format!r}, from others of "
        "that name; set identity.revision to a text that does"
    )


def config_digest(vllm_config: VllmConfig) -> str:
    """Hex SHA-256 over the model's own config (RoPE included) and how vLLM was told to run it."""
    model = vllm_config.model_config
    values = {
        name: value
        for name, value in model.hf_config.to_dict().items()
        if name not in IGNORED_CONFIG
    }
    text = as_text([values, *engine_facts(vllm_config)])
    return hashlib.sha256(b"kvkeep vllm config\0" + text.encode()).hexdigest()


def fingerprint_files(path: Path) -> str:
    """A text that changes with the content of a model's files.

    All bytes are hashed where they are not more than :data:`FULL_HASH_BYTES`. Of more, samples
    are, with sizes and modification times: a copy of such a folder may then miss what the original
    stored, and never hits what another one did.

    Args:
        path: a folder, or a single file.

    Raises:
        IdentityError: there is no file to read.
    """
    if path.is_file():
        files = [path]
    else:
        files = sorted(f for f in path.iterdir() if f.suffix in MODEL_SUFFIXES and f.is_file())
    try:
        sizes = [file.stat().st_size for file in files]
        whole = sum(sizes) <= FULL_HASH_BYTES
        digest = hashlib.sha256(b"kvkeep files\0" + (b"whole" if whole else b"samples"))
        for file, size in zip(files, sizes, strict=True):
            digest.update(f"{file.name}\0{size}\0".encode())
            digest.update(_hash_whole(file) if whole else _hash_samples(file, size))
    except OSError as error:
        raise IdentityError(f"cannot read the model's files in {path}: {error}") from error
    if not files:
        raise IdentityError(f"{path} holds no file of a model that is known")
    return f"files:{digest.hexdigest()}"


def _hash_whole(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _hash_samples(file: Path, size: int) -> bytes:
    """Samples at even distances, the first and the last bytes included, and the file's time."""
    digest = hashlib.sha256(str(file.stat().st_mtime_ns).encode())
    last = max(size - SAMPLE_BYTES, 0)
    with file.open("rb") as stream:
        for index in range(NUM_SAMPLES):
            stream.seek(last * index // (NUM_SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()
