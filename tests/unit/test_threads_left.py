"""The check for threads that outlive their test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(tmp_path, test: str) -> tuple[int, str]:
    """Run one test under the project's conftest."""
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    conftest = conftest.replace("END_TIMEOUT_S = 10.0", "END_TIMEOUT_S = 1")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text(
        conftest.replace("END_TIMEOUT_S = 10.0", "END_TIMEOUT_S = 1")
    )
    (folder / "test_one.py").write_text(test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_thread_that_stays_fails_its_test(tmp_path) -> None:
    code, output = run(
        tmp_path,
        "import threading\n"
        "def test_one():\n"
        "    threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()\n",
    )
    assert code == 1
    assert "threads left running" in output


def test_a_thread_that_ends_soon_or_is_being_started_does_not(tmp_path) -> None:
    """``join`` refuses threads that have not begun, although ``enumerate`` lists them."""
    code, output = run(
        tmp_path,
        "import threading, time\n"
        "class Late(threading.Thread):\n"
        "    def _bootstrap_inner(self):\n"
        "        time.sleep(0.2)\n"
        "        super()._bootstrap_inner()\n"
        "def test_one():\n"
        "    late = Late(target=time.sleep, args=(0.2,))\n"
        "    threading.Thread(target=late.start).start()\n"
        "    time.sleep(0.05)\n"
        "    assert late in threading.enumerate()\n",
    )
    assert code == 0, output
