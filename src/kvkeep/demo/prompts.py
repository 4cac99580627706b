"""The demo's prompts: one long document, then a question, so that all prompts begin alike."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: Questions about document.md that the demo's small model answers from it.
QUESTIONS: tuple[str, ...] = (
    "What is the name of the cat?",
    "How tall is the tower of Marrow Point?",
    "How many steps does the tower have?",
    "What is the name of the supply boat?",
    "What is the lens cleaned with?",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question about the document.

    Attributes:
        question: the question alone.
        token_ids: the whole prompt, the document first.
    """

    question: str
    token_ids: list[int]


def read_document() -> str:
    """The document, about 2,000 tokens of Markdown that was written for this demo."""
    return importlib.resources.files("kvkeep.demo").joinpath("document.md").read_text("utf-8")


def build_prompts(tokenizer: Any, questions: Sequence[str]) -> list[Prompt]:
    """One prompt per question, in the model's chat form if its tokenizer has one.

    Args:
        tokenizer: a tokenizer of transformers.
        questions: what to ask.
    """
    document = read_document()
    return [Prompt(text, _token_ids(tokenizer, f"{document}\n\n{text}")) for text in questions]


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        ids = tokenizer(f"{text}\nAnswer:")["input_ids"]
    else:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    return [int(token) for token in ids]


def first_line(answer: str) -> str:
    """What a reader wants of an answer: its first line, without the rambling after it."""
    lines = answer.strip().splitlines()
    return lines[0].strip() if lines else ""
