"""``kvkeep demo``: questions about one long document, cold and with the cache."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvkeep.cli.demo_report import print_report
from kvkeep.demo.outcome import DemoResult
from kvkeep.demo.outcome import Progress as Report
from kvkeep.demo.prompts import QUESTIONS
from kvkeep.errors import KVKeepError


class EngineName(StrEnum):
    """Engines that the demo runs on."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


def demo(
    engine: Annotated[EngineName, typer.Option(help="What runs the model.")] = (
        EngineName.TRANSFORMERS
    ),
    model: Annotated[
        str | None,
        typer.Option(help="A folder or the name of a model. Default: SmolLM2-135M-Instruct."),
    ] = None,
    questions: Annotated[
        int, typer.Option(min=1, max=len(QUESTIONS), help="How many questions to ask.")
    ] = len(QUESTIONS),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Ask questions about one long document, without and with the cache, and compare.

    Ends with exit code 1 if any token differs.
    """
    bar = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    try:
        with bar:
            task = bar.add_task("starting", total=None)

            def progress(done: int, total: int, doing: str) -> None:
                bar.update(task, completed=done, total=total, description=doing)

            result = _run(engine, model, QUESTIONS[:questions], progress)
    except KVKeepError as error:
        typer.secho(f"kvkeep demo: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    else:
        print_report(result, Console())
    if not result.same_tokens:
        raise typer.Exit(1)


def _run(
    engine: EngineName, model: str | None, questions: tuple[str, ...], progress: Report
) -> DemoResult:
    """Prepare the model if none is named, then run the engine's demo."""
    if engine is EngineName.VLLM:
        from kvkeep.demo.vllm_run import require_vllm, run_vllm

        require_vllm()
        # This process is the demo's own, so its logging may be ours; what the user set stays.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        return run_vllm(_model_name(model, progress), questions, progress)
    from kvkeep.demo.transformers_run import run_transformers

    return run_transformers(_model_name(model, progress), questions, progress)


def _model_name(model: str | None, progress: Report) -> str:
    if model is not None:
        return model
    from kvkeep.demo.model import prepare_model

    progress(0, 1, "preparing SmolLM2-135M-Instruct (the first time takes a while)")
    return str(prepare_model())
