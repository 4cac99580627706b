"""The demo as a command of its own, on a tiny random model with the real tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.demo.prompts import QUESTIONS, build_prompts

pytestmark = pytest.mark.engine


@pytest.fixture
def folder(tiny, smollm2, tmp_path: Path) -> Path:
    tokenizer, _ = smollm2
    model = tiny(vocab_size=len(tokenizer), max_position_embeddings=4096, eos_token_id=2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from kvkeep.cli.main import app; app()"
    return subprocess.run(
        [sys.executable, "-c", code, "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_demo_with_a_model_of_one_s_own(folder: Path) -> None:
    done = _demo("--model", str(folder), "--questions", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["same_tokens"] is True
    assert [item["question"] for item in result["comparisons"]] == list(QUESTIONS[:2])
    for item in result["comparisons"]:
        assert item["num_prompt_tokens"] > 1_900
        assert item["cold"]["num_found"] == 0
        assert item["warm"]["num_found"] == 1_792  # seven chunks of 256
        assert item["warm"]["token_ids"] == item["cold"]["token_ids"]
        assert item["warm"]["first_token_s"] > 0


def test_demo_says_which_model_it_cannot_load(tmp_path: Path) -> None:
    done = _demo("--model", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert "cannot load the model" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_document_is_long_enough(smollm2) -> None:
    tokenizer, _ = smollm2
    prompts = build_prompts(tokenizer, QUESTIONS)
    first, *others = (prompt.token_ids for prompt in prompts)
    for ids in others:
        shared = next(i for i, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b)
        assert shared >= 1_600
