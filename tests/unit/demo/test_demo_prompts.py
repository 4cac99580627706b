"""The demo's document and prompts."""

from __future__ import annotations

from typing import Any

from kvkeep.demo.model import QUESTIONS, build_prompts, first_line, read_document


class _Words:
    """A tokenizer that counts words, with and without a chat template."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template
        self.texts: list[str] = []

    def __call__(self, text: str) -> dict[str, list[int]]:
        self.texts.append(text)
        return {"input_ids": [hash(word) & 0xFFFF for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        assert options["add_generation_prompt"] is True
        return self(f"<user> {messages[0]['content']} <assistant>")


def test_document_is_long_and_plain() -> None:
    text = read_document()
    assert len(text.split()) > 1_300
    assert text.isascii()
    assert len(text) > 7_000


def test_document_holds_the_answers() -> None:
    text = read_document()
    assert len(QUESTIONS) == len(set(QUESTIONS)) >= 4
    for fact in ("called Biscuit", "41 metres high", "187 steps", "named *Patience*", "vinegar"):
        assert fact in text


def test_prompts_share_the_document_as_a_prefix() -> None:
    for template in ("chat", None):
        tokenizer = _Words(template)
        prompts = build_prompts(tokenizer, QUESTIONS)
        assert [prompt.question for prompt in prompts] == list(QUESTIONS)
        shared = len(read_document().split())
        assert len({tuple(prompt.token_ids[:shared]) for prompt in prompts}) == 1
        assert len({tuple(prompt.token_ids) for prompt in prompts}) == len(prompts)
        assert tokenizer.texts[0].startswith("<user>") == (template is not None)


def test_first_line() -> None:
    assert first_line(" Biscuit.\n\nThe lens is\n") == "Biscuit."
    assert first_line("\n \n") == ""
