"""Declares the layout of a vLLM engine's KV caches, or refuses it.

vLLM says what its caches are (KVCacheConfig); nothing is guessed from a tensor's shape. A page
(vLLM's block) of a layer is taken as opaque bytes, so the declaration names everything those bytes
depend on. Called once per worker, when vLLM registers its caches.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kvkeep.errors import LayoutError
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


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
