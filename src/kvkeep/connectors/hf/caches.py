"""The KV caches of transformers: which kind a model uses, and how kvkeep's memory becomes one.

transformers keeps, per layer, K and V as [rows, KV heads, tokens, head size] (``DynamicLayer``).
kvkeep moves K and V as [tokens, KV heads, head size]; the functions here turn one view into the
other without copying. Called from the thread that calls the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.connectors.hf.probe import Probe
from kvkeep.connectors.hf.rows import PromptRow
from kvkeep.errors import LayoutError
from kvkeep.layout import DTYPE_SIZES, GroupLayout, KVLayout, MemoryFormat

#: RoPE kinds whose rotation of a token depends on how long the whole prompt is.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

#: K and V of one layer, each [tokens, KV heads, head size].
LayerPair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelCaches:
    """What a model's KV cache looks like.

    Attributes:
        layout: the declared layout.
        dtype: element type of K and V.
        devices: device of each layer's cache.
        takes_positions: the model's forward accepts ``position_ids``.
        takes_logits_to_keep: ... and ``logits_to_keep``.
        takes_padding: the KV of a prompt is the same behind padding.
    """

    layout: KVLayout
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    takes_positions: bool
    takes_logits_to_keep: bool
    takes_padding: bool

    def allocate(self, num_tokens: int) -> list[LayerPair]:
        """Uninitialised K and V for ``num_tokens`` tokens, one pair per layer, token-major."""
        shape = (num_tokens, self.layout.num_kv_heads, self.layout.head_size)
        return [
            (
                torch.empty(shape, dtype=self.dtype, device=device),
                torch.empty(shape, dtype=self.dtype, device=device),
            )
            for device in self.devices
        ]


def declare_caches(model: Any) -> ModelCaches:
    """Declare the layout that a model's config promises, and check that the model keeps to it.

    Runs a few forward passes over a few tokens.

    Raises:
        LayoutError: the model keeps another kind of cache than plain attention KV that grows by one
            entry per token, or KV that depends on later tokens; the message names it.
    """
    if model.config.is_encoder_decoder:
        name = type(model).__name__
        raise LayoutError(f"{name} is an encoder-decoder; only decoders are supported")
    config = model.config.get_text_config(decoder=True)
    _check_rope(config)
    _check_layers(new_cache(model), f"the config of {type(model).__name__}", config)
    layout = _declared_layout(model, config)
    signature = inspect.signature(model.forward).parameters
    takes_positions = "position_ids" in signature
    probe = Probe(model, layout, takes_positions=takes_positions)
    cache = probe.run_all()
    _check_layers(cache, type(model).__name__, config)
    probe.check_shapes(cache)
    probe.check_causal(cache)
    return ModelCaches(
        layout=layout,
        dtype=getattr(torch, layout.dtype),
        devices=tuple(layer.keys.device for layer in cache.layers),
        takes_positions=takes_positions,
        takes_logits_to_keep="logits_to_keep" in signature,
        takes_padding=probe.takes_padding(cache),
    )


def new_cache(model: Any) -> Any:
    """An empty cache of the kind that generate would make for this model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config.get_text_config(decoder=True))


def fill_cache(cache: Any, pairs: Sequence[LayerPair]) -> None:
    """Let an empty cache of one row hold ``pairs`` (views, not copies)."""
    for layer, (keys, values) in zip(cache.layers, pairs, strict=True):
        set_layer(layer, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])


def set_layer(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Let a DynamicLayer hold K and V, each [rows, heads, tokens, head size]."""
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values


def row_pairs(cache: Any, row: int, first: int, last: int) -> list[LayerPair]:
    """Token-major views of columns [first, last) of one row of a cache."""
    return [
        (
            layer.keys[row, :, first:last].transpose(0, 1),
            layer.values[row, :, first:last].transpose(0, 1),
        )
        for layer in cache.layers
    ]


def join_rows(model: Any, kind: ModelCaches, rows: Sequence[PromptRow], caches: list[Any]) -> Any:
    """One left-padded cache out of one cache per row; the last token of each row is left out.

    Args:
        model: the model.
        kind: what its caches look like.
        rows: the prompts.
        caches: a cache of one row for each, that holds its tokens but perhaps the last one. They
            are emptied meanwhile, so that the KV is in memory twice for one layer at a time only.
    """
    width = rows[0].padding + rows[0].num_tokens - 1
    joined = new_cache(model)
    if width == 0:
        return joined
    for number, target in enumerate(joined.layers):
        parts = [cache.layers[number] for cache in caches]
        if len(rows) == 1 and rows[0].padding == 0:
            set_layer(target, parts[0].keys[:, :, :width], parts[0].values[:, :, :width])
            continue
        shape = (len(rows), kind.layout.num_kv_heads, width, kind.layout.head_size)
        keys = torch.zeros(shape, dtype=kind.dtype, device=kind.devices[number])
        values = torch.zeros_like(keys)
        for row, part in zip(rows, parts, strict=True):
            tokens = row.num_tokens - 1
            if tokens:
                keys[row.index, :, row.padding :] = part.keys[0, :, :tokens]
                values[row.index, :, row.padding :] = part.values[0, :, :tokens]
            part.reset()
        set_layer(target, keys, values)
    return joined


def _check_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters.get("rope_type")]
    kinds += [item.get("rope_type") for item in parameters.values() if isinstance(item, dict)]
    for kind in kinds:
        if kind in LENGTH_DEPENDENT_ROPE:
            raise LayoutError(
                f"rope_type {kind!r}: the KV of a token depends on the length of the whole prompt, "
                "so it does not belong to a prefix"
            )


def _check_layers(cache: Any, where: str, config: Any) -> None:
    """A DynamicCache whose layers are all plain DynamicLayers, one per layer of the model."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if type(cache) is not DynamicCache:
        raise LayoutError(
            f"{where} uses the cache {type(cache).__name__}; only DynamicCache is supported"
        )
    kinds = {type(layer) for layer in cache.layers} - {DynamicLayer}
    if kinds:
        others = sorted(kind.__name__ for kind in kinds)
        raise LayoutError(
            f"{where} has cache layers of the kind {', '.join(others)}; only plain attention "
            "(DynamicLayer) is supported, since anything else does not grow by one entry per token"
        )
    if len(cache.layers) != config.num_hidden_layers:
        raise LayoutError(
            f"{where} has {len(cache.layers)} cache layers for {config.num_hidden_layers} layers"
        )


def _declared_layout(model: Any, config: Any) -> KVLayout:
    """The layout that the config promises."""
    import transformers

    query_heads = getattr(config, "num_attention_heads", None)
    if not isinstance(query_heads, int):
        raise LayoutError(f"the config of {type(model).__name__} does not say its attention heads")
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPE_SIZES:
        raise LayoutError(f"the model runs in {dtype}; known are {', '.join(DTYPE_SIZES)}")
    layer_bytes = 2 * heads * head_size * DTYPE_SIZES[dtype]
    return KVLayout(
        fmt=MemoryFormat.KV_2LTD,
        dtype=dtype,
        page_size=1,
        groups=(GroupLayout("full", config.num_hidden_layers, layer_bytes),),
        num_kv_heads=heads,
        head_size=head_size,
        engine=f"transformers {transformers.__version__} DynamicCache",
    )
