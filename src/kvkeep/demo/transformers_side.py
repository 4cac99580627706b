"""What the demo's processes do with transformers: load the model, answer a prompt, time it.

Every side has the same stopwatch: from the call of ``generate`` to the first token that a streamer
is handed.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from kvkeep.demo.model import quiet_transformers
from kvkeep.demo.outcome import Reply
from kvkeep.errors import ConfigError, MissingExtraError

#: Tokens of an answer, at most.
ANSWER_TOKENS = 24


class _FirstTokenWatch:
    """A streamer that notes when the first generated token arrives."""

    def __init__(self) -> None:
        self._calls = 0
        self._started = time.perf_counter()
        self.first_token_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        """The first call brings the prompt, the second one the first token."""
        self._calls += 1
        if self._calls == 2:
            self.first_token_s = time.perf_counter() - self._started

    def end(self) -> None:
        """Nothing is held back."""


def load_model(model_name: str) -> tuple[Any, Any]:
    """Tokenizer and model in float32, on a GPU where there is one.

    Raises:
        MissingExtraError: transformers is not installed.
        ConfigError: there is no such model.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("the demo through transformers", "hf") from error
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(model_name)
            model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the model {model_name}: {error}") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return tokenizer, model.to(device).eval()


def answer(
    side: Any, token_ids: list[int], device: torch.device, *, num_tokens: int = ANSWER_TOKENS
) -> Reply:
    """Greedy answer of ``side``, which is the model or the model with kvkeep.

    Args:
        side: has ``generate``.
        token_ids: the prompt.
        device: of the model.
        num_tokens: most tokens to generate.
    """
    ids = torch.tensor([token_ids], device=device)
    watch = _FirstTokenWatch()
    sequence = side.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        streamer=watch,
    )
    return Reply(sequence[0, ids.shape[1] :].tolist(), watch.first_token_s)
