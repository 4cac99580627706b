"""docs/start-vllm.md, run as it stands in a process of its own, prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PAGE = (Path(__file__).parents[3] / "docs" / "start-vllm.md").read_text()


def test_the_start_with_vllm(model_dir, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "start.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "MODEL": str(model_dir)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"(\d+) tokens were not computed", done.stdout)
    assert found == ["0", "256"]
    assert "`256 tokens were not computed`" in PAGE
