"""``kvkeep config``: what the settings are, their schema, and those of LMCache translated."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvkeep.cli.output import telling_failures
from kvkeep.config.explain import DEFAULT_ORIGIN, ExplainedSetting, explain, json_schema
from kvkeep.config.lmcache import Fate, Translation, translate_file
from kvkeep.config.load import resolve_settings
from kvkeep.errors import ConfigError

#: Columns of the screen that the list takes, at most.
WIDTH = 80

app = typer.Typer(
    help="Show, describe and translate settings.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]


@app.command(
    "explain",
    epilog='Example: kvkeep config explain --config kvkeep.yaml --extra \'{"cpu.size": "20GiB"}\'',
)
def explain_settings(
    config: Annotated[
        Path | None, typer.Option(help="A YAML file. Default: the one that KVKEEP_CONFIG names.")
    ] = None,
    extra: Annotated[
        str | None, typer.Option(help="The engine's extra config, as a JSON object.")
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Leave out what has its default.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every setting: value, unit, meaning, and where the value came from.

    Reads the YAML file, then KVKEEP_ variables, then the extra config; the later one wins. Ends
    with exit code 2 if a setting is unknown or wrong.
    """
    with telling_failures("config explain"):
        loaded = resolve_settings(
            yaml_path=config, env=os.environ, extra=read_extra(extra), extra_origin="--extra"
        )
    listed = [item for item in explain(loaded) if not (changed and item.origin == DEFAULT_ORIGIN)]
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in listed]))
    elif listed:
        _print_settings(listed, Console())
    else:
        Console(stderr=True).print("every setting has its default")


@app.command("schema", epilog="Example: kvkeep config schema > kvkeep.schema.json")
def print_schema() -> None:
    """Print the JSON schema of the YAML file, which editors complete and check with.

    Put this line at the top of the file: # yaml-language-server: $schema=kvkeep.schema.json
    """
    typer.echo(json.dumps(json_schema(), indent=2))


@app.command("import", epilog="Example: kvkeep config import lmcache.yaml > kvkeep.yaml")
def import_settings(
    file: Annotated[Path, typer.Argument(help="A YAML file of LMCache.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Translate the settings of LMCache: YAML to standard output, what is lost to standard error.

    Ends with exit code 1 if a key has no counterpart, and with 2 if the file is no good.
    """
    with telling_failures("config import"):
        translation = translate_file(file)
    if as_json:
        notes = [asdict(note) for note in translation.notes]
        typer.echo(json.dumps({"settings": translation.settings, "notes": notes}))
    else:
        if translation.settings:
            typer.echo(yaml.safe_dump(translation.settings, sort_keys=False), nl=False)
        _print_notes(translation, Console(stderr=True))
    if any(note.fate is Fate.NO_COUNTERPART for note in translation.notes):
        raise typer.Exit(1)


def read_extra(text: str | None) -> dict[str, object]:
    """The value of ``--extra``.

    Raises:
        ConfigError: it is no JSON object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError('--extra must be a JSON object, like {"cpu.size": "20GiB"}')
    return value


def _print_settings(listed: list[ExplainedSetting], console: Console) -> None:
    for item in listed:
        unit = f" ({item.unit})" if item.unit and item.value is None else ""
        line = Text.assemble((item.name, "bold"), " = ", (item.text + unit, "cyan"))
        line.append(f"   {item.origin}", style="dim" if item.origin == DEFAULT_ORIGIN else "green")
        console.print(line, width=WIDTH)
        console.print(Padding(Text(item.meaning), (0, 0, 1, 2)), width=WIDTH)


def _print_notes(translation: Translation, console: Console) -> None:
    lost = [note for note in translation.notes if note.fate is Fate.NO_COUNTERPART]
    fine = [note for note in translation.notes if note.fate is Fate.NOT_NEEDED]
    for title, notes in (("No counterpart in kvkeep:", lost), ("Not needed:", fine)):
        if notes:
            console.print(Text(title, style="bold"))
        for note in notes:
            text = Text.assemble((note.key, "cyan"), f": {note.reason}")
            console.print(Padding(text, (0, 0, 0, 2)), width=WIDTH)
    if not lost:
        console.print("Every key was translated or is not needed.", style="green")
