"""``kvkeep doctor``: what this machine and these settings can do, and what to change."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvkeep.cli.config import read_extra
from kvkeep.cli.output import Bar, telling_failures
from kvkeep.config.load import resolve_settings
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Section

WIDTH = 80
#: By level: sign, sign where the terminal has letters only, colour.
_SIGNS = {
    Level.FINE: ("✓", "+", "green"),
    Level.NOTE: ("○", "o", "cyan"),
    Level.WARNING: ("!", "!", "yellow"),
    Level.ERROR: ("✗", "x", "bold red"),
}
EXIT_CODES = {Level.WARNING: 1, Level.ERROR: 2}
_VERDICTS = {
    Level.FINE: "All is well.",
    Level.NOTE: "All is well; something could be better.",
    Level.WARNING: "It works, but not as well as it could.",
    Level.ERROR: "Something does not work with these settings.",
}


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="A YAML file. Default: the one that KVKEEP_CONFIG names.")
    ] = None,
    extra: Annotated[
        str | None, typer.Option(help="The engine's extra config, as a JSON object.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a model, or its config.json: checks its layout and size."),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, max=1024, help="Ranks of the engine here (tensor parallelism).")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Say what this machine and these settings can do, and what to change.

    Looks at processor, memory, huge pages, limits, GPUs, versions, the model's layout, the disk and
    the remote tier; each look has a deadline, and nothing is changed. Ends with exit code 0 if all
    is well, 1 if something works worse than it could, and 2 if something does not work, or the
    settings are wrong.
    """
    from kvkeep.doctor.examination import examine, to_change, worst
    from kvkeep.doctor.model_config import read_model

    with telling_failures("doctor"):
        loaded = resolve_settings(
            yaml_path=config, env=os.environ, extra=read_extra(extra), extra_origin="--extra"
        )
        shape = None if model is None else read_model(model).on_rank(ranks)
        patient = Patient(loaded.settings, os.environ, shape, ranks)
        with Bar(Console(stderr=True)) as bar:
            sections = examine(patient, bar.report)
    changes, verdict = to_change(sections), worst(sections)
    if as_json:
        typer.echo(json.dumps(_values(sections, changes, verdict)))
    else:
        _print(sections, changes, verdict, Console())
    if verdict in EXIT_CODES:
        raise typer.Exit(EXIT_CODES[verdict])


def _values(
    sections: Sequence[Section], changes: list[tuple[Level, Advice]], verdict: Level
) -> dict[str, object]:
    return {
        "verdict": verdict.name.lower(),
        "sections": {
            section.name: [
                {
                    "topic": one.topic,
                    "level": one.level.name.lower(),
                    "text": one.text,
                    **one.values,
                }
                for one in section.findings
            ]
            for section in sections
        },
        "changes": [
            {"level": level.name.lower(), "text": advice.text, "line": advice.line}
            for level, advice in changes
        ],
    }


def _print(
    sections: Sequence[Section],
    changes: list[tuple[Level, Advice]],
    verdict: Level,
    console: Console,
) -> None:
    is_plain = console.options.ascii_only
    topics = [one.topic for section in sections for one in section.findings]
    widest = max(len(topic) for topic in topics)
    for section in sections:
        console.print()
        console.print(Text(section.name, style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, min_width=widest)
        table.add_column(ratio=1)
        for one in section.findings:
            table.add_row(_sign(one, is_plain), Text(one.topic, style="dim"), Text(one.text))
        console.print(Padding(table, (0, 0, 0, 2)), width=WIDTH)
    console.print()
    if changes:
        console.print(Text("what to change", style="bold"))
    for number, (level, advice) in enumerate(changes, 1):
        text = Text.assemble((f"{number} ", _SIGNS[level][2]), advice.text)
        console.print(Padding(text, (0, 0, 0, 2)), width=WIDTH)
        if advice.line:
            # One line, however long, so that it can be copied.
            console.print(Text(f"      {advice.line}", style="cyan"), soft_wrap=True)
    if changes:
        console.print()
    console.print(Text(_VERDICTS[verdict], style=_SIGNS[verdict][2]), width=WIDTH)


def _sign(finding: Finding, is_plain: bool) -> Text:
    sign, plain, style = _SIGNS[finding.level]
    return Text(plain if is_plain else sign, style=style)
