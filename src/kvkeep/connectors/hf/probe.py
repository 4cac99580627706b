"""Probe: a few tokens through a model, to see whether its KV is what its config promises.

What is declared is tried before it is believed. Called once, when a model is attached, from the
thread that calls the model.
"""

from __future__ import annotations

from typing import Any

import torch

from kvkeep.errors import LayoutError
from kvkeep.layout import KVLayout

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
