"""The command line: exit codes, the table, errors. The engines' results are stood in for."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvkeep import __version__
from kvkeep.cli.demo_report import print_report
from kvkeep.cli.main import app
from kvkeep.demo import transformers_run, vllm_run
from kvkeep.demo.outcome import Comparison, DemoResult, Progress, Reply
from kvkeep.demo.prompts import QUESTIONS
from kvkeep.errors import LayoutError, MissingExtraError


def _result(same: bool = True, questions: tuple[str, ...] = QUESTIONS) -> DemoResult:
    items = [
        Comparison(
            question=question,
            answer="The cat is called Biscuit.\n\nThe lens",
            num_prompt_tokens=2_003,
            cold=Reply([5, 6, 7], 4.0),
            warm=Reply([5, 6, 7] if same else [5, 6, 8], 0.5, 1_792),
        )
        for question in questions
    ]
    return DemoResult("transformers", "a model", items, 0.06)


def _run(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], same: bool = True
) -> tuple[int, str, list[tuple[str, int]]]:
    """(exit code, output, (model, number of questions) of each run)."""
    runs: list[tuple[str, int]] = []

    def run(model: str, questions: tuple[str, ...], progress: Progress) -> DemoResult:
        runs.append((model, len(questions)))
        progress(1, 2, "asking")
        return _result(same, questions)

    monkeypatch.setattr(transformers_run, "run_transformers", run)
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output, runs


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.strip()) == (0, f"kvkeep {__version__}")


def test_same_tokens_end_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, runs = _run(monkeypatch, ["demo", "--model", "some/model", "--questions", "2"])
    assert code == 0
    assert runs == [("some/model", 2)]
    assert "The cat is called Biscuit." in output
    assert "The lens" not in output
    assert "Every token is the same" in output


def test_one_other_token_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = _run(monkeypatch, ["demo", "--model", "m"], same=False)
    assert code == 1
    assert "Some tokens differ" in output
    assert "NO" in output


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, _ = _run(monkeypatch, ["demo", "--model", "m", "--json", "--questions", "1"])
    values = json.loads(output[output.index("{") :])
    assert code == 0
    assert values["same_tokens"] is True
    assert values["dtype"] == "float32"
    assert values["comparisons"][0]["speed_up"] == 8.0
    assert values["comparisons"][0]["warm"]["num_found"] == 1_792


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
        print_report(_result(same), console)
    lines = captured.get().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    row = next(line for line in lines if line.lstrip().startswith("1 What"))
    verdict = "yes" if same else "NO"
    assert row.split()[-7:] == ["1,792", "4.00", "s", "500", "ms", "8.0x", verdict]
    for question in QUESTIONS:
        assert question in captured.get()
