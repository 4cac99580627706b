"""The command line: exit codes, the table, errors. The engines' results are stood in for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvkeep import __version__
from kvkeep.cli.demo import print_report
from kvkeep.cli.main import app
from kvkeep.demo import transformers_run, vllm_run
from kvkeep.demo.model import QUESTIONS
from kvkeep.demo.outcome import Comparison, DemoResult, Progress, Reply
from kvkeep.errors import LayoutError, MissingExtraError


def _result(
    same: bool = True, questions: tuple[str, ...] = QUESTIONS, *, same_restarted: bool = True
) -> DemoResult:
    items = [
        Comparison(
            question=question,
            answer="The cat is called Biscuit.\n\nThe lens",
            num_prompt_tokens=2_003,
            cold=Reply([5, 6, 7], 4.0),
            warm=Reply([5, 6, 7] if same else [5, 6, 8], 0.5, 1_792),
            restarted=Reply([5, 6, 7] if same_restarted else [5, 7, 7], 0.8, 1_536),
        )
        for question in questions
    ]
    return DemoResult("transformers", "a model", items, 0.06, 6.25)


def _run(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    same: bool = True,
    same_restarted: bool = True,
) -> tuple[int, str, list[tuple[str, int, Path]]]:
    """(exit code, output, (model, number of questions, folder of the disk) of each run)."""
    runs: list[tuple[str, int, Path]] = []

    def run(model: str, questions: tuple[str, ...], progress: Progress, disk: Path) -> DemoResult:
        assert disk.is_dir()
        (disk / "a file").touch()
        runs.append((model, len(questions), disk))
        progress(1, 2, "asking")
        return _result(same, questions, same_restarted=same_restarted)

    monkeypatch.setattr(transformers_run, "run_transformers", run)
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output, runs


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.strip()) == (0, f"kvkeep {__version__}")


def test_same_tokens_end_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, runs = _run(monkeypatch, ["demo", "--model", "some/model", "--questions", "2"])
    assert code == 0
    [(model, num_questions, disk)] = runs
    assert (model, num_questions) == ("some/model", 2)
    assert not disk.exists(), "the temporary folder is gone"
    assert "The cat is called Biscuit." in output
    assert "The lens" not in output
    assert "Every token is the same" in output


def test_one_other_token_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = _run(monkeypatch, ["demo", "--model", "m"], same=False)
    assert code == 1
    assert "Some tokens differ" in output
    assert "NO" in output


def test_one_other_token_after_the_restart_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = _run(monkeypatch, ["demo", "--model", "m"], same_restarted=False)
    assert code == 1
    assert "Some tokens differ" in output
    assert "NO" in output.partition("after a restart")[2]
    assert "NO" not in output.partition("after a restart")[0]


def test_a_folder_of_one_s_own_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "disk"
    code, _, runs = _run(monkeypatch, ["demo", "--model", "m", "--disk", str(folder)])
    assert code == 0
    assert runs[0][2] == folder
    assert (folder / "a file").exists()


def test_a_folder_that_cannot_be_made_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, output, runs = _run(
        monkeypatch, ["demo", "--model", "m", "--disk", str(tmp_path / "file" / "disk")]
    )
    assert (code, runs) == (2, [])
    assert "cannot use" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_in_order(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    seen: list[Path] = []

    def run(model: str, questions: tuple[str, ...], progress: Progress, disk: Path) -> DemoResult:
        seen.append(disk)
        os.kill(os.getpid(), number)
        signal.sigtimedwait([], 10)  # the handler runs here at the latest
        raise AssertionError("the signal ended nothing")

    monkeypatch.setattr(transformers_run, "run_transformers", run)
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)}
    done = CliRunner().invoke(app, ["demo", "--model", "m"])
    assert done.exit_code not in (0, 2)
    assert not isinstance(done.exception, AssertionError)
    assert seen
    assert not seen[0].exists()
    assert {kind: signal.getsignal(kind) for kind in before} == before


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = _run(monkeypatch, ["demo", "--model", "m", "--json", "--questions", "1"])
    values = json.loads(output[output.index("{") :])
    assert code == 0
    assert values["same_tokens"] is True
    assert values["dtype"] == "float32"
    assert values["comparisons"][0]["speed_up"] == 8.0
    assert values["comparisons"][0]["warm"]["num_found"] == 1_792
    assert values["comparisons"][0]["restarted"]["num_found"] == 1_536
    assert values["comparisons"][0]["speed_up_restarted"] == 5.0
    assert values["start_s"] == 6.25


@pytest.mark.parametrize(
    "error, words",
    [
        (MissingExtraError("transformers", "hf"), "kvkeep[hf]"),
        (LayoutError("cache layers of the kind X"), "cache layers of the kind X"),
    ],
)
def test_what_cannot_run_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*_: object) -> DemoResult:
        raise error

    monkeypatch.setattr(transformers_run, "run_transformers", fail)
    done = CliRunner().invoke(app, ["demo", "--model", "m"])
    assert done.exit_code == 2
    assert words in done.output


def test_vllm_that_is_not_installed_ends_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_run.importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["demo", "--engine", "vllm", "--model", "m"])
    assert done.exit_code == 2
    assert "pip install 'kvkeep[vllm]'" in done.output


@pytest.mark.parametrize(
    "arguments", [["--questions", "0"], ["--engine", "other"], ["--modle", "x"]]
)
def test_wrong_arguments_end_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["demo", *arguments]).exit_code == 2


@pytest.mark.parametrize("same", [True, False])
def test_report_fits_80_columns(same: bool) -> None:
    console = Console(width=120, record=True, force_terminal=False, quiet=False)
    with console.capture() as captured:
        print_report(_result(same), console, "kvkeep")
    lines = captured.get().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    rows = [line for line in lines if line.startswith("1 What")]
    verdict = "yes" if same else "NO"
    assert rows[0].split()[-7:] == ["1,792", "4.00", "s", "500", "ms", "8.0x", verdict]
    assert rows[1].split()[-7:] == ["1,536", "4.00", "s", "800", "ms", "5.0x", "yes"]
    assert "Starting again took 6.25 s" in captured.get()
    assert all(len(line) <= 80 for line in lines)
    for number, question in enumerate(QUESTIONS, 1):  # in both parts of the table, and below it
        assert sum(line.startswith(f"{number} {question}") for line in lines) == 3
