"""CacheIdentity of a vLLM worker: which model, which weights, which settings of both.

Called once per worker. A model from the hub is named by its commit; a local one by its files'
content, since a folder's name says nothing about what is in it.

Which of vLLM's settings KV depends on, besides the weights and the model's own config.

Pure functions, called once per process at the engine's start. What is named here becomes part of
the identity; a test holds every other field of these settings to be one that KV does not depend on.

Declares the layout of a vLLM engine's KV caches, or refuses it.

vLLM says what its caches are (KVCacheConfig); nothing is guessed from a tensor's shape. A page
(vLLM's block) of a layer is taken as opaque bytes, so the declaration names everything those bytes
depend on. Called once per worker, when vLLM registers its caches.

Where a vLLM worker stands among the others of its engine, and whether rank 0 stores for all.

Asked once in the scheduler's process and once per worker; all arrive at the same answer.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvkeep.config import IdentitySettings, Settings
from kvkeep.engine.build import is_first_rank_only
from kvkeep.errors import IdentityError, LayoutError
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.memory.placement import WorkerPlace

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: Of ModelConfig: how the weights are turned into a model.
MODEL_FIELDS = (
    "dtype",
    "quantization",
    "quantization_config",
    "code_revision",
    "config_format",
    "convert",
    "disable_sliding_window",
    "model_class_overrides",
    "model_impl",
    "runner",
)
#: Of MultiModalConfig: how an image becomes embeddings. vLLM's hash of the image names none of it.
INPUT_FIELDS = (
    "language_model_only",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
#: Of LoRAConfig: which modules an adapter changes, and in which precision.
ADAPTER_FIELDS = ("enable_tower_connector_lora", "lora_dtype", "target_modules")
#: The kind of RoPE whose factors vLLM chooses by ``max_model_len``.
LONG_ROPE = "longrope"
#: Ways of loading that read the files of the model's folder and give the same weights.
USUAL_LOAD_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "instanttensor"})
#: Ways that read those files, and may read others of them.
FILE_LOAD_FORMATS = USUAL_LOAD_FORMATS | {
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
}


def engine_facts(vllm_config: VllmConfig) -> list[Any]:
    """The settings of an engine that its KV depends on, in a stable order."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    load_format = load_format_of(vllm_config)
    return [
        chosen(model, MODEL_FIELDS),
        chosen(model.multimodal_config, INPUT_FIELDS),
        chosen(vllm_config.cache_config, ("cache_dtype", "kv_cache_dtype_skip_layers")),
        "" if load_format in USUAL_LOAD_FORMATS else load_format,
        model.max_model_len if has_long_rope(model.hf_config.to_dict()) else None,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.enable_expert_parallel,
    ]


def adapter_facts(vllm_config: VllmConfig) -> str:
    """How this engine applies LoRA adapters, as one stable text; empty if it takes none."""
    if vllm_config.lora_config is None:
        return ""
    return as_text(chosen(vllm_config.lora_config, ADAPTER_FIELDS))


def are_inputs_hashed(vllm_config: VllmConfig) -> bool:
    """Images are named by their content; False: vLLM counts them, from one in every process."""
    inputs = vllm_config.model_config.multimodal_config
    is_needed = vllm_config.cache_config.enable_prefix_caching
    return inputs is None or bool(is_needed) or inputs.mm_processor_cache_gb != 0


def chosen(settings: object, names: Iterable[str]) -> dict[str, Any] | None:
    """Some fields of a settings object; None if there is no such object."""
    return None if settings is None else {name: getattr(settings, name, None) for name in names}


def as_text(facts: object) -> str:
    """One stable text of nested plain values; what is none is taken by its ``str``."""
    return json.dumps(facts, sort_keys=True, default=str)


def load_format_of(vllm_config: VllmConfig) -> str:
    """How the weights are loaded, as vLLM names it."""
    load_format = vllm_config.load_config.load_format
    return str(getattr(load_format, "value", load_format))


def has_long_rope(config: object) -> bool:
    """LongRoPE is named somewhere in a model's config."""
    if isinstance(config, dict):
        return any(has_long_rope(value) for value in config.values())
    return config == LONG_ROPE


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


def block_size_of(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in a block of the only group of layers.

    Raises:
        LayoutError: there is not exactly one group.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        names = [type(group.kv_cache_spec).__name__ for group in groups]
        raise LayoutError(
            f"kvkeep needs one group of attention layers, this model has {len(groups)}: {names}"
        )
    size: int = groups[0].kv_cache_spec.block_size
    return size


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse an engine whose KV at a token depends on more than the tokens up to it.

    Raises:
        LayoutError: it does, or its blocks do not hold one token per slot; says why.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    block_size_of(kv_cache_config)
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    reasons = {
        f"its KV cache is no full attention but {spec}": (
            type(spec) not in (FullAttentionSpec, MLAAttentionSpec)
        ),
        "its attention is not causal": (
            bool(getattr(spec, "non_causal", False)) or bool(vllm_config.model_config.is_diffusion)
        ),
        "its cache stores no single token per slot": getattr(spec, "tokens_per_state", 1) != 1,
        "its pages hold a scale per token, all of which its first forward pass sets to one": bool(
            getattr(spec.kv_quant_mode, "is_per_token_head", False)
        ),
        "decode context parallelism splits a block's tokens over ranks": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "with pipeline parallelism a stage cannot know whether another one's load has failed": (
            parallel.pipeline_parallel_size > 1
        ),
        "a speculative decoder keeps KV of its own in the same blocks": (
            group.is_eagle_group or (speculative is not None and speculative.uses_draft_kv_cache())
        ),
        "vLLM does not share prefixes of it either": (
            not vllm_config.model_config.is_prefix_caching_supported
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise LayoutError(f"kvkeep cannot keep the KV of this model: {reason}")


def declare_layout(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[KVLayout, list[torch.Tensor]]:
    """The layout that vLLM declares, and the caches of its layers in order.

    Args:
        vllm_config: the engine's configuration, with its attention layers.
        kv_cache_config: what vLLM says about the caches.
        kv_caches: tensor per layer name, dimension 0 being the block.

    Raises:
        LayoutError: kvkeep cannot keep such caches; prints them.
    """
    check_supported(vllm_config, kv_cache_config)
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    missing = [name for name in group.layer_names if name not in kv_caches]
    if missing:
        raise LayoutError(f"vLLM registered no KV cache for {', '.join(missing)}")
    tensors = [kv_caches[name] for name in group.layer_names]
    first = tensors[0]
    if any(len(tensor) != kv_cache_config.num_blocks for tensor in tensors):
        raise LayoutError(
            f"vLLM declares {kv_cache_config.num_blocks} blocks, layer {group.layer_names[0]} has "
            f"shape {tuple(first.shape)}, stride {first.stride()}: dimension 0 must be the block"
        )
    layout = KVLayout(
        fmt=MemoryFormat.OPAQUE_PAGES,
        dtype="uint8",
        page_size=spec.block_size,
        groups=(GroupLayout("full", len(tensors), spec.real_page_size_bytes),),
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        engine=engine_text(vllm_config, kv_cache_config, first),
    )
    return layout, tensors


def engine_text(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, cache: torch.Tensor
) -> str:
    """Everything the bytes of a page depend on, apart from the model, as one stable text."""
    import vllm

    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    strides = cache.stride()
    order = sorted(range(1, cache.ndim), key=lambda dim: (-strides[dim], dim))
    facts = {
        "vllm": vllm.__version__,
        "device": cache.device.type,
        "backends": ",".join(sorted(_backend_names(vllm_config))),
        "layout": kv_cache_config.kv_cache_layout,
        "shape": "x".join(str(size) for size in cache.shape[1:]),
        "order": "".join(str(dim) for dim in order),
        "dtype": str(cache.dtype).removeprefix("torch."),
        "cache_dtype": vllm_config.cache_config.cache_dtype,
        "quant": str(spec.kv_quant_mode),
        "model_dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "isa": cpu_packing(vllm_config) if cache.device.type == "cpu" else "",
    }
    return ";".join(f"{name}={value}" for name, value in facts.items())


def cpu_packing(vllm_config: VllmConfig) -> str:
    """Which order the CPU backend packs a page in: it depends on the instruction set."""
    layers = _attention_layers(vllm_config)
    packings = sorted({str(getattr(layer, "isa", "unknown")) for layer in layers})
    abilities = {
        "amx": torch.cpu._is_amx_tile_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx512bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx2": torch.cpu._is_avx2_supported(),
    }
    named = "+".join(name for name, has in abilities.items() if has)
    return f"{platform.machine()}/{'+'.join(packings)}/{named}"


def _attention_layers(vllm_config: VllmConfig) -> list[object]:
    """The engine's own attention layers."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "get_attn_backend")]


def _backend_names(vllm_config: VllmConfig) -> set[str]:
    return {
        layer.get_attn_backend().get_name()  # type: ignore[attr-defined]
        for layer in _attention_layers(vllm_config)
    }


def stores_on_first_rank_only(vllm_config: VllmConfig, settings: Settings) -> bool:
    """Rank 0 stores and loads for all ranks.

    Raises:
        ConfigError: the settings want it, and the ranks' KV differs or they are not on one machine.
    """
    parallel = vllm_config.parallel_config
    return (
        is_first_rank_only(
            settings.ranks,
            has_same_kv=_has_same_kv(vllm_config),
            is_one_machine=parallel.local_world_size == parallel.world_size,
        )
        and parallel.world_size > 1
    )


def worker_place(
    vllm_config: VllmConfig, settings: Settings, kv_caches: Mapping[str, torch.Tensor]
) -> WorkerPlace:
    """The worker's rank, and on which GPU its caches are."""
    parallel = vllm_config.parallel_config
    device = next(iter(kv_caches.values())).device
    return WorkerPlace(
        rank=parallel.rank,
        num_ranks=parallel.world_size,
        num_local=parallel.local_world_size,
        has_same_kv=_has_same_kv(vllm_config),
        first_rank_only=stores_on_first_rank_only(vllm_config, settings),
        cuda_device=device.index if device.type == "cuda" else None,
    )


def _has_same_kv(vllm_config: VllmConfig) -> bool:
    """Latent attention: every rank of a tensor-parallel group computes the whole KV."""
    is_latent: bool = vllm_config.model_config.use_mla
    return is_latent and vllm_config.parallel_config.pipeline_parallel_size == 1
