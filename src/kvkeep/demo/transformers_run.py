"""The demo through transformers: plain generate, then the same with kvkeep.

Both sides run the same prompts with the same stopwatch: from the call of ``generate`` to the first
token that a streamer is handed. Before anything is timed, one whole prompt is answered, so that
code, memory pools and caches of the machine are warm for the cold side too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kvkeep.demo.model import quiet_transformers
from kvkeep.demo.outcome import DemoResult, Progress, Reply, compare
from kvkeep.demo.prompts import Prompt, build_prompts
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


def run_transformers(model_name: str, questions: Sequence[str], progress: Progress) -> DemoResult:
    """Ask all questions cold, read the document once with kvkeep, ask them again.

    Args:
        model_name: a folder or the name of a model.
        questions: what to ask about the document.
        progress: told before each step.

    Raises:
        MissingExtraError: transformers is not installed.
        ConfigError: there is no such model.
        LayoutError: the model's cache is of a kind that kvkeep does not keep.
    """
    from kvkeep.connectors.hf import attach

    steps = 2 * len(questions) + 3
    progress(0, steps, "loading the model")
    tokenizer, model = _load(model_name)
    prompts = build_prompts(tokenizer, questions)
    progress(1, steps, "warming up the machine")
    _answer(model, prompts[0], model, num_tokens=2)
    cold: list[Reply] = []
    for number, prompt in enumerate(prompts):
        progress(2 + number, steps, f"cold, question {number + 1}: {prompt.question}")
        cold.append(_answer(model, prompt, model))
    with attach(model) as kept:
        progress(2 + len(prompts), steps, "reading the document once, with kvkeep")
        _answer(kept, prompts[0], model, num_tokens=1)
        store_s = kept.last_call.store_s if kept.last_call else None
        warm: list[Reply] = []
        for number, prompt in enumerate(prompts):
            done = 3 + len(prompts) + number
            progress(done, steps, f"warm, question {number + 1}: {prompt.question}")
            reply = _answer(kept, prompt, model)
            found = kept.last_call.num_found if kept.last_call else 0
            warm.append(Reply(reply.token_ids, reply.first_token_s, found))
    progress(steps, steps, "done")
    comparisons = compare(tokenizer, prompts, cold, warm)
    return DemoResult("transformers", model_name, comparisons, store_s)


def _load(model_name: str) -> tuple[Any, Any]:
    """Tokenizer and model in float32, on a GPU where there is one."""
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


def _answer(side: Any, prompt: Prompt, model: Any, num_tokens: int = ANSWER_TOKENS) -> Reply:
    """Greedy answer of ``side``, which is the model or the model with kvkeep."""
    ids = torch.tensor([prompt.token_ids], device=model.device)
    watch = _FirstTokenWatch()
    sequence = side.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        streamer=watch,
    )
    return Reply(sequence[0, ids.shape[1] :].tolist(), watch.first_token_s)
