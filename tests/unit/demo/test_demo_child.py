"""The demo's processes: steps, results, errors, deaths. With jobs of a few lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvkeep.demo import child
from kvkeep.errors import KVKeepError

BEGIN = """
import os, sys
from kvkeep.demo.child import serve
from kvkeep.errors import ConfigError
def work(job, step):
"""
END = """
if __name__ == "__main__":
    sys.exit(serve(work))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``run("return 1", a=2)``: (result, steps) of a job."""

    def run_job(body: str, on_step=None, **job: object) -> tuple[object, list[tuple[int, str]]]:
        lines = [f"    {line}" for line in body.splitlines()]
        (tmp_path / "job_of_a_test.py").write_text(BEGIN + "\n".join(lines) + END)
        steps: list[tuple[int, str]] = []
        result = child.run_child(
            "job_of_a_test", job, on_step or (lambda *step: steps.append(step))
        )
        return result, steps

    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    return run_job


def test_steps_and_result(run) -> None:
    result, steps = run("step(0, 'a')\nstep(1, 'ä b')\nreturn job['x'] + [3]", x=[1, 2])
    assert (result, steps) == ([1, 2, 3], [(0, "a"), (1, "ä b")])


def test_what_libraries_print_is_no_answer(run) -> None:
    assert run("print('{\"result\": 1}')\nos.write(1, b'noise')\nreturn 2")[0] == 2


def test_an_error_of_ours_travels(run) -> None:
    with pytest.raises(KVKeepError, match=r"^no such model$"):
        run("raise ConfigError('no such model')")


def test_any_other_exception_shows_the_end_of_its_trace(run) -> None:
    with pytest.raises(KVKeepError, match=r"(?s)ended with code 1.*ZeroDivisionError"):
        run("return 1 / 0")


@pytest.mark.parametrize("body", ["os._exit(3)", "step(0, 'a')\nos.kill(os.getpid(), 9)"])
def test_a_process_that_dies(run, body: str) -> None:
    with pytest.raises(KVKeepError, match="ended with code"):
        run(body)


def test_a_process_that_dies_before_it_has_read_its_job(run, tmp_path: Path) -> None:
    (tmp_path / "dead.py").write_text("import os\nos.close(0)\nos._exit(4)\n")
    with pytest.raises(KVKeepError, match="ended with code 4"):
        child.run_child("dead", {"much": "x" * (1 << 20)}, print)


def test_a_silent_process_is_ended(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SILENCE_TIMEOUT_S", 0.2)
    with pytest.raises(KVKeepError, match=r"silent for 0\.2 s"):
        run("import signal\nsignal.pause()")


def test_whoever_does_not_end_is_killed(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "END_TIMEOUT_S", 0.2)

    pids: list[int] = []

    def interrupt(step: int, doing: str) -> None:
        pids.append(int(doing))
        raise KeyboardInterrupt

    ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    with pytest.raises(KeyboardInterrupt):
        run(ignore + "step(0, str(os.getpid()))\nsignal.pause()", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_idle_threads_sleep_unless_the_user_wants_otherwise(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert run("return os.environ['OMP_WAIT_POLICY']")[0] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert run("return os.environ['OMP_WAIT_POLICY']")[0] == "active"
