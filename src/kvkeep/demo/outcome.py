"""What a run of the demo found: values that the command line shows and scripts read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Called with (steps done, steps in all, what is being done now).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a model.

    Attributes:
        token_ids: the generated tokens.
        first_token_s: seconds from the call to the first token.
        num_found: tokens of the prompt whose KV was found; after a restart, those found on the
            disk.
    """

    token_ids: list[int]
    first_token_s: float
    num_found: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question, answered three times.

    Attributes:
        question: the question.
        answer: the warm answer as text.
        num_prompt_tokens: length of the prompt.
        cold: without kvkeep.
        warm: with it, after the document was seen once.
        restarted: the same in a new process, from the disk.
    """

    question: str
    answer: str
    num_prompt_tokens: int
    cold: Reply
    warm: Reply
    restarted: Reply

    @property
    def same_tokens(self) -> bool:
        """All answers have the same tokens."""
        return self.is_same(self.warm) and self.is_same(self.restarted)

    def is_same(self, reply: Reply) -> bool:
        """A reply has the tokens of the cold one."""
        return self.cold.token_ids == reply.token_ids

    def speed_up(self, reply: Reply) -> float:
        """Cold time to the first token over that of a reply."""
        return self.cold.first_token_s / reply.first_token_s


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A run of the demo.

    Attributes:
        engine: ``"transformers"`` or ``"vllm"``.
        model: name or folder of the model.
        comparisons: one per question.
        store_s: seconds that storing the document took, where the engine tells.
        start_s: seconds until the new process could answer: its start, loading the model, opening
            the cache. In no other figure.
    """

    engine: str
    model: str
    comparisons: Sequence[Comparison]
    store_s: float | None
    start_s: float

    @property
    def same_tokens(self) -> bool:
        """Every answer has the same tokens cold, warm and after the restart."""
        return all(item.same_tokens for item in self.comparisons)

    @property
    def cold_s(self) -> float:
        """Seconds to the first tokens, cold, over all questions."""
        return sum(item.cold.first_token_s for item in self.comparisons)

    @property
    def warm_s(self) -> float:
        """Seconds to the first tokens, warm, over all questions."""
        return sum(item.warm.first_token_s for item in self.comparisons)

    @property
    def restarted_s(self) -> float:
        """Seconds to the first tokens after the restart, over all questions."""
        return sum(item.restarted.first_token_s for item in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        rows = [
            {
                **asdict(item),
                "same_tokens": item.same_tokens,
                "speed_up": item.speed_up(item.warm),
                "speed_up_restarted": item.speed_up(item.restarted),
            }
            for item in self.comparisons
        ]
        return {
            "engine": self.engine,
            "model": self.model,
            "dtype": "float32",
            "store_s": self.store_s,
            "start_s": self.start_s,
            "same_tokens": self.same_tokens,
            "comparisons": rows,
        }
