"""The command starts without heavy libraries: help and small commands are quick."""

from __future__ import annotations

import subprocess
import sys


def test_help_needs_no_torch_no_engine_and_no_plot():
    code = (
        "import sys, kvkeep.cli.main; "
        "print(sorted({'torch', 'vllm', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
