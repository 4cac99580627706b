"""The KV caches of transformers: which kind a model uses, and how kvkeep's memory becomes one.

transformers keeps, per layer, K and V as [rows, KV heads, tokens, head size] (``DynamicLayer``).
kvkeep moves K and V as [tokens, KV heads, head size]; the functions here turn one view into the
other without copying. Called from the thread that calls the model.

Probe: a few tokens through a model, to see whether its KV is what its config promises.

What is declared is tried before it is believed. Called once, when a model is attached, from the
thread that calls the model.

The prompts in a batch: where each row's tokens begin, and what a call found for each.

Pure functions and values. In a batch of width W a row with n tokens looks like this, since models
that decode are padded on the left:

    column     0 ......... W-n-1 | W-n ................ W-1
    content    padding           | token 0 ...... token n-1
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.errors import LayoutError
from kvkeep.layout import DTYPE_SIZES, GroupLayout, KVLayout, MemoryFormat

#: Columns of padding before the tokens of a probe.
PADDING = 2


class Probe:
    """A few tokens, and what a model keeps of them."""

    def __init__(self, model: Any, layout: KVLayout, *, takes_positions: bool) -> None:
        """Choose the tokens.

        Args:
            model: the model.
            layout: what its config promises.
            takes_positions: its forward accepts ``position_ids``.
        """
        self._model = model
        self._layout = layout
        self._takes_positions = takes_positions
        self._name = type(model).__name__
        # A token count that differs from all other sizes, so that no two axes can be mistaken.
        count = next(n for n in range(3, 7) if n not in (layout.num_kv_heads, layout.head_size))
        pad = getattr(model.config, "pad_token_id", None)
        tokens = [token for token in range(count + 2) if token != pad]
        self._ids = torch.tensor([tokens[:count]], device=model.device)
        self._other_ids = torch.tensor([[*tokens[: count - 1], tokens[count]]], device=model.device)

    def run_all(self) -> Any:
        """The cache that the model makes of the tokens; None if it makes none."""
        return self._run(self._ids)

    def check_shapes(self, cache: Any) -> None:
        """Raise LayoutError if the cache is not as large as the config promises."""
        layout, count = self._layout, self._ids.shape[1]
        expected = (1, layout.num_kv_heads, count, layout.head_size)
        for number, layer in enumerate(cache.layers):
            for tensor in (layer.keys, layer.values):
                dtype = str(tensor.dtype).removeprefix("torch.")
                if tuple(tensor.shape) != expected or dtype != layout.dtype:
                    raise LayoutError(
                        f"layer {number} of {self._name} keeps {dtype} {tuple(tensor.shape)}, but "
                        f"its config promises {layout.dtype} {expected}"
                    )

    def check_causal(self, cache: Any) -> None:
        """Run the tokens in two parts, the second after the first, with another last token.

        Raises:
            LayoutError: the model does not go on after a cache, or the KV of a token depends on
                later tokens.
        """
        try:
            parted = self._run(self._other_ids[:, :1])
            parted = self._run(self._other_ids[:, 1:], cache=parted)
        except Exception as error:  # here the model's code begins, and it says what it cannot do
            raise LayoutError(
                f"{self._name} does not compute several tokens after a cache: {error}"
            ) from error
        if not _is_same(cache, parted, slice(0, -1), slice(0, -1)):
            raise LayoutError(
                f"the KV of a token does not belong to a prefix in {self._name}: its attention is "
                "not causal, or it counts positions otherwise after a cache"
            )

    def takes_padding(self, cache: Any) -> bool:
        """The KV of the tokens is the same behind padding, which a mask leaves out."""
        width = PADDING + self._ids.shape[1]
        ids = torch.cat([self._ids[:, :1]] * PADDING + [self._ids], dim=1)
        mask = (torch.arange(width, device=ids.device) >= PADDING).long()[None]
        try:
            padded = self._run(ids, mask=mask)
        except Exception:  # noqa: BLE001  the model's code
            return False
        return _is_same(cache, padded, slice(None), slice(PADDING, None))

    def _run(
        self, ids: torch.Tensor, *, cache: Any = None, mask: torch.Tensor | None = None
    ) -> Any:
        """The cache after a forward pass over ``ids``, without dropout in any mode."""
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True}
        first = 0
        if cache is not None:
            inputs["past_key_values"] = cache
            first = cache.get_seq_length()
        if mask is not None:
            inputs["attention_mask"] = mask
        if self._takes_positions and (cache is not None or mask is not None):
            positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
            if mask is not None:
                positions = (mask.cumsum(-1) - 1).clamp(min=0)
            inputs["position_ids"] = positions
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                return getattr(self._model(**inputs), "past_key_values", None)
        finally:
            for module, mode in modes:
                module.training = mode


def _is_same(one: Any, other: Any, of_one: slice, of_other: slice) -> bool:
    """Columns of two caches hold the same KV, but for rounding."""
    for left, right in zip(one.layers, other.layers, strict=True):
        for a, b in ((left.keys, right.keys), (left.values, right.values)):
            expected, found = a[:, :, of_one].float(), b[:, :, of_other].float()
            tolerance = max(1e-3, 4 * torch.finfo(a.dtype).eps)
            if bool((expected - found).norm() > tolerance * expected.norm()):
                return False
    return True


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a batch.

    Attributes:
        index: row in the batch.
        padding: columns of padding before the first token.
        tokens: int64 [n] on the CPU, at least one.
    """

    index: int
    padding: int
    tokens: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, without padding."""
        return int(self.tokens.shape[0])


@dataclass(frozen=True, slots=True)
class RowReport:
    """What a call did for one prompt.

    Attributes:
        num_tokens: tokens of the prompt, without padding.
        num_found: leading tokens whose KV was found.
        num_loaded: leading tokens whose KV was used instead of computed; at most ``num_tokens -
            1``, since the last token is always computed.
        num_stored: tokens of the prompt that are stored now, as one run from its start.
    """

    num_tokens: int
    num_found: int
    num_loaded: int
    num_stored: int


@dataclass(frozen=True, slots=True)
class CallReport:
    """What a call of generate did.

    Attributes:
        rows: one report per prompt, in the order of the batch.
        load_s: seconds spent in looking up and loading.
        prefill_s: seconds spent in computing what was not found, but for the last token.
        store_s: seconds spent in storing.
    """

    rows: Sequence[RowReport]
    load_s: float
    prefill_s: float
    store_s: float

    @property
    def num_found(self) -> int:
        """Tokens found over all rows."""
        return sum(row.num_found for row in self.rows)


def split_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[PromptRow]:
    """Take the padding off each row.

    Args:
        input_ids: integers [rows, width].
        attention_mask: integers of the same shape, 0 at padding.

    Raises:
        ValueError: the shapes differ, a row is empty, padded on the right or has holes.
    """
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}, but input_ids has "
            f"{tuple(input_ids.shape)}"
        )
    ids = input_ids.detach().to("cpu", torch.long)
    present = attention_mask.detach().to("cpu") != 0
    width = ids.shape[1]
    rows: list[PromptRow] = []
    for index in range(ids.shape[0]):
        count = int(present[index].sum())
        if count == 0:
            raise ValueError(f"row {index} of the batch is nothing but padding")
        if not bool(present[index, width - count :].all()):
            raise ValueError(
                f"row {index} of the batch is padded on the right or has holes in its attention "
                "mask; pad on the left (padding_side='left')"
            )
        rows.append(PromptRow(index, width - count, ids[index, width - count :]))
    return rows


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
