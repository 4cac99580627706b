"""Which of vLLM's settings KV depends on, besides the weights and the model's own config.

Pure functions, called once per process at the engine's start. What is named here becomes part of
the identity; a test holds every other field of these settings to be one that KV does not depend on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
