"""What ``generate`` was asked for: which arguments a cached call can honour, and which it refuses.

Pure checks, no copying; called by the wrapper at the start of a call, from the caller's thread.
What is refused would either use another cache than ours or make KV depend on more than the tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.errors import LayoutError

#: Arguments that bring or choose a cache.
CACHE_ARGUMENTS = ("past_key_values", "cache_params")
#: Options that must be off: option -> why. Each is on when its value is neither None, False nor 0.
REFUSED_OPTIONS: Mapping[str, str] = {
    "custom_generate": "a custom decoding method manages its own cache",
    "assistant_early_exit": "assisted decoding rolls its cache back",
    "prompt_lookup_num_tokens": "assisted decoding rolls its cache back",
    "speculation_type": "assisted decoding rolls its cache back",
    "use_mtp": "assisted decoding rolls its cache back",
    "is_assistant": "assisted decoding rolls its cache back",
    "penalty_alpha": "contrastive search manages its own cache",
    "dola_layers": "this decoding method manages its own cache",
    "constraints": "constrained search manages its own cache",
    "force_words_ids": "constrained search manages its own cache",
    "guidance_scale": "guidance runs a second prompt beside this one",
    "negative_prompt_ids": "guidance runs a second prompt beside this one",
    "negative_prompt_attention_mask": "guidance runs a second prompt beside this one",
    "prefill_chunk_size": "the prefill is done before generate is called",
    "token_healing": "it changes the prompt",
    "output_attentions": "the prompt is not computed again, so its attentions do not exist",
    "output_hidden_states": "the prompt is not computed again, so its hidden states do not exist",
}
#: Values at which an option of REFUSED_OPTIONS is off as well.
_NEUTRAL: Mapping[str, object] = {"guidance_scale": 1}


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked call of ``generate``.

    Attributes:
        input_ids: int64 [rows, width], as it was given.
        attention_mask: int64 [rows, width] on the same device, 1 where a token is.
        num_beams: beams of a beam search, 1 for none.
        num_copies: sequences that generate makes of each row (beams or return sequences).
        pad_token_id: the token that fills finished rows, or None.
        options: everything else, passed on unchanged.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    num_beams: int
    num_copies: int
    pad_token_id: int | None
    options: dict[str, Any]


def check_call(model: Any, inputs: torch.Tensor | None, options: Mapping[str, Any]) -> GenerateCall:
    """Take the arguments of a ``generate`` call apart and check them.

    Args:
        model: the transformers model.
        inputs: the first positional argument of generate.
        options: all others by name, ``generation_config`` included.

    Raises:
        LayoutError: the call brings, chooses or forbids a KV cache.
        ValueError: an argument is missing, unknown or cannot be honoured; the message names it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in CACHE_ARGUMENTS:
        if name in given:
            raise LayoutError(f"{name} cannot be passed: kvkeep brings the cache of the prompt")
    ask = _OptionReader(model, given)
    _check_cache_options(ask)
    _check_known(model, given)
    if given.pop("assistant_model", None) is not None:
        raise LayoutError("assistant_model: assisted decoding rolls its cache back; unsupported")
    for name, reason in REFUSED_OPTIONS.items():
        if _is_on(ask(name), _NEUTRAL.get(name, 0)):
            raise ValueError(
                f"{name} does not go with a kept cache: {reason}; call generate of the model itself"
            )
    input_ids = _one_of(inputs, given.pop("input_ids", None))
    mask = given.pop("attention_mask", None)
    pad = _single_id(ask("pad_token_id"))
    if mask is None:
        mask = _infer_mask(input_ids, pad, ask("eos_token_id"))
    num_beams = int(ask("num_beams") or 1)
    return GenerateCall(
        input_ids=input_ids,
        attention_mask=mask.to(device=input_ids.device, dtype=torch.long),
        num_beams=num_beams,
        num_copies=max(num_beams, int(ask("num_return_sequences") or 1)),
        pad_token_id=pad,
        options=given,
    )


class _OptionReader:
    """The value that generate will use for an option: argument, given config, model's config."""

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        self._given = given
        self._configs = (given.get("generation_config"), model.generation_config)

    def __call__(self, name: str) -> Any:
        if name in self._given:
            return self._given[name]
        values = (getattr(config, name, None) for config in self._configs if config is not None)
        return next((value for value in values if value is not None), None)


def _is_on(value: Any, neutral: object) -> bool:
    if isinstance(value, (int, float)):
        return bool(value) and value != neutral
    return value is not None


def _check_cache_options(ask: _OptionReader) -> None:
    """Refuse every cache but the default one."""
    implementation = ask("cache_implementation")
    if implementation is not None:
        raise LayoutError(
            f"cache_implementation={implementation!r} is not supported: kvkeep keeps the KV of the "
            "default DynamicCache only; leave the option out"
        )
    if ask("use_cache") is False:
        raise LayoutError("use_cache=False asks for no cache, so there is nothing to keep")


def _check_known(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse inputs of the model on which its KV would depend besides the tokens."""
    known = {"input_ids", "attention_mask", "tokenizer", "use_model_defaults", "trust_remote_code"}
    known.update(inspect.signature(type(model).generate).parameters)
    for name in given:
        if name not in known and not hasattr(model.generation_config, name):
            raise ValueError(
                f"generate got {name!r}: kvkeep knows token ids and attention masks only; "
                "KV that depends on anything else would not belong to exactly these tokens"
            )


def _one_of(inputs: torch.Tensor | None, input_ids: torch.Tensor | None) -> torch.Tensor:
    if (inputs is None) == (input_ids is None):
        raise ValueError("generate needs the prompt once: as its first argument or as input_ids")
    ids = inputs if inputs is not None else input_ids
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.numel() == 0:
        shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"input_ids must be a tensor [rows, tokens], not empty, got {shape}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be integers, got {ids.dtype}")
    return ids


def _single_id(value: Any) -> int | None:
    """A token id out of an int or a tensor, None for none."""
    return None if value is None else int(value)


def _id_set(value: Any) -> set[int]:
    """Token ids out of None, an int, a list or a tensor."""
    if value is None:
        return set()
    return {int(item) for item in torch.as_tensor(value).reshape(-1)}


def _infer_mask(input_ids: torch.Tensor, pad: int | None, eos: Any) -> torch.Tensor:
    """The mask that generate itself assumes where none is given.

    Pad tokens are padding if there is a pad token that is not an end token too; else all is text.
    """
    if pad is not None and pad not in _id_set(eos):
        return input_ids.ne(pad).long()
    return torch.ones_like(input_ids, dtype=torch.long)
