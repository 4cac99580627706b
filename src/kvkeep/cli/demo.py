"""``kvkeep demo``: questions about one long document, cold, with the cache, and after a restart.

How ``kvkeep demo`` shows its result: a table of 80 columns, the answers, and a summary.
"""

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
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkeep.cli.output import Bar, quiet_screen
from kvkeep.demo.model import QUESTIONS, disk_folder, first_line
from kvkeep.demo.outcome import Comparison, DemoResult, Reply
from kvkeep.demo.outcome import Progress as Report
from kvkeep.errors import ConfigError, KVKeepError

#: Columns of the screen that the report takes, at most.
WIDTH = 80


def print_report(result: DemoResult, console: Console, program: str) -> None:
    """Show what a run of the demo found, and what to do next.

    Args:
        result: of the run.
        console: to print to.
        program: how this command was called, to be called again.
    """
    console.print()
    console.print(_table(result), width=WIDTH)
    console.print()
    for number, item in enumerate(result.comparisons, 1):
        console.print(Text(f"{number} {item.question}", style="bold"))
        console.print(Padding(Text(first_line(item.answer)), (0, 0, 0, 2)), width=WIDTH)
    console.print()
    console.print(_summary(result), width=WIDTH)
    console.print()
    console.print(
        Text.assemble(
            ("Next: ", "dim"),
            (f"{program} doctor", "cyan"),
            (" says what this machine can do, README.md how to use it.", "dim"),
        ),
        width=WIDTH,
    )


def _table(result: DemoResult) -> Table:
    """The warm replies, then those after the restart, each beside the cold one."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        title=Text(f"One document, {_count(result)}, {result.engine}\n"),
        title_style="bold",
        padding=0,
        width=WIDTH,
    )
    table.add_column("\n\nquestion", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in (
        "\nprompt\ntokens",
        "\n\nfound",
        "first\ntoken\ncold",
        "first\ntoken\nkept",
    ):
        table.add_column(name, justify="right", min_width=len("4.00 s"), no_wrap=True)
    table.add_column("\nspeed\nup", justify="right", style="bold", no_wrap=True)
    table.add_column("\n\nsame", justify="right", no_wrap=True)
    table.add_row(Text("in the same process, from memory", style="italic cyan"))
    for number, item in enumerate(result.comparisons, 1):
        _add_row(table, number, item, item.warm)
    table.add_row()
    table.add_row(Text("after a restart, from disk", style="italic cyan"))
    for number, item in enumerate(result.comparisons, 1):
        _add_row(table, number, item, item.restarted)
    return table


def _add_row(table: Table, number: int, item: Comparison, reply: Reply) -> None:
    table.add_row(
        Text(f"{number} {item.question}"),
        f"{item.num_prompt_tokens:,}",
        f"{reply.num_found:,}",
        _seconds(item.cold.first_token_s),
        _seconds(reply.first_token_s),
        f"{item.speed_up(reply):.1f}x",
        Text("yes", style="green") if item.is_same(reply) else Text("NO", style="bold red"),
    )


def _summary(result: DemoResult) -> Text:
    """Totals, and what the comparison of tokens means."""
    warm, restarted = result.cold_s / result.warm_s, result.cold_s / result.restarted_s
    text = Text(
        f"Waiting for first tokens took {_seconds(result.cold_s)} cold, "
        f"{_seconds(result.warm_s)} from memory ({warm:.1f} times as fast) and "
        f"{_seconds(result.restarted_s)} from disk ({restarted:.1f} times)."
    )
    if result.store_s is not None:
        text.append(f" Storing the document took {_seconds(result.store_s)}, once.")
    text.append(
        f"\nStarting again took {_seconds(result.start_s)}: a new process that loads the model and "
        "opens the cache. It is in none of the times above.\n"
    )
    if result.same_tokens:
        text.append("Every token is the same with the cache as without it.", style="green")
    else:
        text.append(
            "Some tokens differ with the cache. In float32, as here, they must not.",
            style="bold red",
        )
    text.append(
        " The demo runs in float32 for this comparison: in bfloat16 a prompt that is computed in "
        "two parts rounds differently from one computed in one, cache or no cache.",
        style="dim",
    )
    return text


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def _count(result: DemoResult) -> str:
    number = len(result.comparisons)
    return "1 question" if number == 1 else f"{number} questions"


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
