"""What a run of the demo found: values that the command line shows and scripts read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvkeep.demo.prompts import Prompt

#: Called with (steps done, steps in all, what is being done now).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a model.

    Attributes:
        token_ids: the generated tokens.
        first_token_s: seconds from the call to the first token.
        num_found: tokens of the prompt whose KV was found.
    """

    token_ids: list[int]
    first_token_s: float
    num_found: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question, answered cold and warm.

    Attributes:
        question: the question.
        answer: the warm answer as text.
        num_prompt_tokens: length of the prompt.
        cold: without kvkeep.
        warm: with it, after the document was seen once.
    """

    question: str
    answer: str
    num_prompt_tokens: int
    cold: Reply
    warm: Reply

    @property
    def same_tokens(self) -> bool:
        """Both answers have the same tokens."""
        return self.cold.token_ids == self.warm.token_ids

    @property
    def speed_up(self) -> float:
        """Cold time to the first token over warm."""
        return self.cold.first_token_s / self.warm.first_token_s


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A run of the demo.

    Attributes:
        engine: ``"transformers"`` or ``"vllm"``.
        model: name or folder of the model.
        comparisons: one per question.
        store_s: seconds that storing the document took, where the engine tells.
    """

    engine: str
    model: str
    comparisons: Sequence[Comparison]
    store_s: float | None

    @property
    def same_tokens(self) -> bool:
        """Every answer has the same tokens cold and warm."""
        return all(item.same_tokens for item in self.comparisons)

    @property
    def cold_s(self) -> float:
        """Seconds to the first tokens, cold, over all questions."""
        return sum(item.cold.first_token_s for item in self.comparisons)

    @property
    def warm_s(self) -> float:
        """Seconds to the first tokens, warm, over all questions."""
        return sum(item.warm.first_token_s for item in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        rows = [
            {**asdict(item), "same_tokens": item.same_tokens, "speed_up": item.speed_up}
            for item in self.comparisons
        ]
        return {
            "engine": self.engine,
            "model": self.model,
            "dtype": "float32",
            "store_s": self.store_s,
            "same_tokens": self.same_tokens,
            "comparisons": rows,
        }


def compare(
    tokenizer: Any, prompts: Sequence[Prompt], cold: Sequence[Reply], warm: Sequence[Reply]
) -> list[Comparison]:
    """Put the replies to each prompt side by side; the three lists have one order."""
    return [
        Comparison(
            question=prompt.question,
            answer=tokenizer.decode(warm_reply.token_ids, skip_special_tokens=True),
            num_prompt_tokens=len(prompt.token_ids),
            cold=cold_reply,
            warm=warm_reply,
        )
        for prompt, cold_reply, warm_reply in zip(prompts, cold, warm, strict=True)
    ]
