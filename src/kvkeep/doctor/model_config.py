"""ModelShape: what a model's ``config.json`` says about its KV. Pure but for reading that file.

Nothing of the engine is imported. The keys are those of Hugging Face configurations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvkeep.errors import ConfigError
from kvkeep.layout import DTYPE_SIZES, GroupLayout, KVLayout, MemoryFormat

#: Keys that hold a language model's part in the config of a larger model.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
#: What older configs call the same things.
_OLD_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
}
#: Kinds of layers that keep one entry per token, for all tokens.
_FULL_KINDS = frozenset({"full_attention", "attention"})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """KV of one model.

    Attributes:
        name: of the folder.
        num_layers: layers that keep KV.
        num_kv_heads: KV heads; 1 for latent attention.
        head_size: elements of a head; the latent and its rotary part for latent attention.
        has_values: K and V are kept; False for latent attention, which keeps one of both.
        dtype: element type that the weights have, and the KV unless the engine is told otherwise.
        other_layers: kinds of layers whose KV kvkeep does not keep, like ``sliding_attention``.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    has_values: bool
    dtype: str
    other_layers: tuple[str, ...] = ()

    @property
    def token_layer_bytes(self) -> int:
        """Bytes that one layer keeps for one token."""
        parts = 2 if self.has_values else 1
        return parts * self.num_kv_heads * self.head_size * DTYPE_SIZES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes that all layers keep for one token."""
        return self.num_layers * self.token_layer_bytes

    def on_rank(self, num_ranks: int) -> ModelShape:
        """What each of some ranks keeps: its share of the KV heads; a latent is whole on each."""
        if not self.has_values:
            return self
        return replace(self, num_kv_heads=max(1, self.num_kv_heads // num_ranks))

    def layout(self, page_tokens: int) -> KVLayout:
        """The layout of an engine that keeps this KV in pages of ``page_tokens`` tokens."""
        return KVLayout(
            MemoryFormat.OPAQUE_PAGES,
            "uint8",
            page_tokens,
            (GroupLayout("full", self.num_layers, page_tokens * self.token_layer_bytes),),
            self.num_kv_heads,
            self.head_size,
            "kvkeep doctor",
        )


def read_model(path: Path) -> ModelShape:
    """The shape of the model in a folder.

    Args:
        path: the folder, or its ``config.json``.

    Raises:
        ConfigError: there is no such file, or it does not say what is needed.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--model {path}: cannot read {file}: {error.strerror}; name the folder of a model in "
            "Hugging Face's form, which has a config.json"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--model {path}: {file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {path}: {file} is no JSON object")
    try:
        return shape_of(config, file.absolute().parent.name)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"--model {path}: {file} does not describe a decoder with attention: {missing}"
        ) from error


def shape_of(config: Mapping[str, object], name: str) -> ModelShape:
    """The shape that a config describes.

    Raises:
        KeyError: a key is missing.
        ValueError: a value is not usable.
    """
    part: Mapping[str, object] = config
    for key in _TEXT_PARTS:
        inner = config.get(key)
        if isinstance(inner, dict):
            part = {**config, **inner}
    part = {**{new: part[old] for old, new in _OLD_NAMES.items() if old in part}, **part}
    if part.get("is_encoder_decoder") is True:
        raise ValueError("it is an encoder-decoder")
    num_layers = _number(part, "num_hidden_layers")
    dtype, others = _dtype(part, config), _other_layers(part)
    if part.get("kv_lora_rank") is not None:
        size = _number(part, "kv_lora_rank") + _number(part, "qk_rope_head_dim")
        return ModelShape(name, num_layers, 1, size, False, dtype, others)
    heads = _number(part, "num_attention_heads")
    is_one = part.get("multi_query") is True and not part.get("new_decoder_architecture")
    kv_heads = 1 if is_one else _number(part, "num_key_value_heads", heads)
    head_size = _number(part, "head_dim", 0) or _number(part, "hidden_size") // heads
    return ModelShape(name, num_layers, kv_heads, head_size, True, dtype, others)


def _other_layers(config: Mapping[str, object]) -> tuple[str, ...]:
    """Kinds of layers that are no full attention."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return tuple(sorted({str(kind) for kind in kinds} - _FULL_KINDS))
    if any(key.startswith(("mamba_", "ssm_")) for key in config):
        return ("mamba",)
    window = config.get("sliding_window")
    if isinstance(window, int) and config.get("use_sliding_window", True):
        return ("sliding_attention",)
    return ()


def _number(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}, not a positive whole number")
    return value


def _dtype(part: Mapping[str, object], whole: Mapping[str, object]) -> str:
    for config in (part, whole):
        for key in ("dtype", "torch_dtype"):
            name = config.get(key)
            if name is not None:
                text = str(name).removeprefix("torch.")
                if text not in DTYPE_SIZES:
                    raise ValueError(f"{key} is {name!r}; known: {', '.join(DTYPE_SIZES)}")
                return text
    return "float32"  # what transformers takes where nothing is said
