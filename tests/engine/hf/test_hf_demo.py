"""The demo as a command of its own, on a tiny random model with the real tokenizer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.demo.model import QUESTIONS, build_prompts
from kvkeep.testing.chunks import wait_until
from support.disk import chunk_files

pytestmark = pytest.mark.engine


@pytest.fixture
def folder(tiny, smollm2, tmp_path: Path) -> Path:
    tokenizer, _ = smollm2
    model = tiny(vocab_size=len(tokenizer), max_position_embeddings=4096, eos_token_id=2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


COMMAND = [sys.executable, "-c", "from kvkeep.cli.main import app; app()", "demo"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Its temporary folders are made in ``tmp_path/temporary``; one thread, as in this process."""
    (tmp_path / "temporary").mkdir()
    return {**os.environ, "TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1"}


def _demo(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=240, env=env
    )


def test_demo_with_a_model_and_a_folder_of_one_s_own(
    folder: Path, env: dict[str, str], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    done = _demo(env, "--model", str(folder), "--questions", "2", "--disk", str(disk), "--json")
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
        assert item["restarted"]["num_found"] == 1_792
        assert item["restarted"]["token_ids"] == item["cold"]["token_ids"]
        assert item["restarted"]["first_token_s"] > 0
    assert result["start_s"] > 0
    assert len(chunk_files(disk)) == 7


def test_ctrl_c_leaves_no_process_and_no_folder(folder: Path, env: dict[str, str]) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "--model", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,  # a terminal sends Ctrl-C to all processes of a command
    )
    try:
        wait_until(lambda: any(Path(env["TMPDIR"]).rglob("*.kvc")), timeout_s=120)
        os.killpg(demo.pid, signal.SIGINT)
        demo.communicate(timeout=60)
        assert demo.returncode != 0
        assert os.listdir(env["TMPDIR"]) == []
        with pytest.raises(ProcessLookupError):
            os.killpg(demo.pid, 0)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait(60)


def test_demo_says_which_model_it_cannot_load(tmp_path: Path, env: dict[str, str]) -> None:
    done = _demo(env, "--model", str(tmp_path / "nothing"))
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
