"""``kvkeep demo``: questions about one long document, cold, with the cache, and after a restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from kvkeep.cli.bar import Bar
from kvkeep.cli.demo_report import print_report
from kvkeep.cli.screen import quiet_screen
from kvkeep.demo.folder import disk_folder
from kvkeep.demo.outcome import DemoResult
from kvkeep.demo.outcome import Progress as Report
from kvkeep.demo.prompts import QUESTIONS
from kvkeep.errors import ConfigError, KVKeepError

#: Signals that end the demo in order, as Ctrl-C does: processes are ended, folders removed.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


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
    disk: Annotated[
        Path | None,
        typer.Option(help="Folder of the disk tier, which is kept. Default: a temporary one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Ask questions about one long document: without the cache, with it, and after a restart.

    Ends with exit code 1 if any token differs.
    """
    run = _run_vllm if engine is EngineName.VLLM else _run_transformers
    try:
        with _ending_in_order(), disk_folder(disk) as folder:
            result = run(model, QUESTIONS[:questions], folder)
    except KVKeepError as error:
        typer.secho(f"kvkeep demo: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    else:
        print_report(result, Console(), _program())
    if not result.same_tokens:
        raise typer.Exit(1)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Let signals that would end this process at once leave its ``with`` blocks first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _program() -> str:
    """How this command was called: by its name, if that is enough to find it."""
    name = Path(sys.argv[0]).name
    found = shutil.which(name)
    return name if found is not None and found == sys.argv[0] else sys.argv[0]


def _run_transformers(model: str | None, questions: tuple[str, ...], disk: Path) -> DemoResult:
    from kvkeep.demo.transformers_run import run_transformers

    with Bar(Console(stderr=True)) as bar:
        return run_transformers(_model_name(model, bar.report), questions, bar.report, disk)


def _run_vllm(model: str | None, questions: tuple[str, ...], disk: Path) -> DemoResult:
    from kvkeep.demo.child import WAIT_ASLEEP
    from kvkeep.demo.vllm_run import require_vllm, run_vllm

    require_vllm()
    # This process is the demo's own, so its environment may be ours; what the user set stays.
    for name, value in {"VLLM_LOGGING_LEVEL": "ERROR", **WAIT_ASLEEP}.items():
        os.environ.setdefault(name, value)
    with quiet_screen() as console, Bar(console) as bar:
        return run_vllm(_model_name(model, bar.report), questions, bar.report, disk)


def _model_name(model: str | None, report: Report) -> str:
    if model is not None:
        if model.startswith(("/", "./", "../")) and not Path(model).is_dir():
            raise ConfigError(f"cannot load the model {model}: there is no such folder")
        return model
    from kvkeep.demo.model import prepare_model

    report(0, 1, "preparing SmolLM2-135M-Instruct (the first time takes a while)")
    return str(prepare_model())
