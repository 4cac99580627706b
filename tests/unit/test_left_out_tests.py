"""Tests that a platform cannot run are left out there, and nowhere else."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def collected(marker: str, can_run: bool) -> tuple[int, str]:
    """Exit code and output of a collection of Mooncake's contract."""
    program = f"""
import sys, pytest
class Platform:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        plugins = config.pluginmanager.get_plugins()
        needs = next(one.NEEDS for one in plugins if hasattr(one, "NEEDS"))
        needs[{marker!r}] = ({can_run}, "this platform lacks it")
sys.exit(pytest.main(
    ["--collect-only", "-q", "tests/contract/test_mooncake_contract.py"], [Platform()]
))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_a_platform_lacks_is_left_out() -> None:
    code, output = collected("mooncake", can_run=False)
    assert code == 5, output  # nothing is left
    assert "TestMooncake" not in output
    assert "deselected" in output


def test_what_it_has_is_run() -> None:
    code, output = collected("mooncake", can_run=True)
    assert code == 0, output
    assert "TestMooncake" in output
    assert "deselected" not in output


def test_the_platform_of_continuous_integration_runs_all(request) -> None:
    plugins = request.config.pluginmanager.get_plugins()
    needs = next(one.NEEDS for one in plugins if hasattr(one, "NEEDS"))
    has_wheel, _ = needs["mooncake"]
    assert has_wheel == (sys.platform == "linux" and platform.machine() == "x86_64")
