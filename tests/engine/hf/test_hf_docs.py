"""docs/start-transformers.md, run as it stands, prints what it says; and what the log says."""

from __future__ import annotations

import io
import logging
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from kvkeep.config import load_settings
from kvkeep.config.load import setting_fields
from kvkeep.config.settings import VLLM_ONLY, given_for_vllm
from kvkeep.connectors.hf import attach

pytestmark = pytest.mark.engine

PAGE = (Path(__file__).parents[3] / "docs" / "start-transformers.md").read_text()


def test_the_start_with_transformers():
    code = next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "start-transformers.md", "exec"), {})
    said = re.search(r"It prints\n\n((?:    .*\n)+)", PAGE)[1]
    expected = [line.strip() for line in said.splitlines() if "tokens" in line]
    assert len(expected) == 2
    assert [line for line in printed.getvalue().splitlines() if " loaded" in line] == expected


def test_settings_for_vllm_alone_are_told(tiny, tmp_path, caplog):
    """Fault 46: an option that has no effect here says so."""
    extra = {
        "chunk_size": 16,
        "cpu.size": "1MiB",
        "cpu.first_rank_size": "2MiB",
        "disk.path": str(tmp_path),
        "prefetch.timeout": "3s",
        "lookup.socket_dir": str(tmp_path),
    }
    with (
        caplog.at_level(logging.WARNING, "kvkeep.connectors.hf"),
        attach(tiny(), load_settings(extra=extra), revision="1"),
    ):
        pass
    told = re.findall(r"(\S+) was given, and has no effect", caplog.text)
    assert told == ["cpu.first_rank_size", "lookup.socket_dir", "prefetch.timeout"]


def test_settings_for_vllm_alone_are_settings():
    assert {name for name, _ in setting_fields()} >= VLLM_ONLY
    assert given_for_vllm(load_settings()) == []
