"""Every command explains itself: help, an example, --json, and its exit codes in the document."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvkeep.cli.main import app

DOCUMENT = Path(__file__).parents[3] / "docs" / "cli.md"
#: What it prints is JSON, or YAML, anyway.
NO_JSON = {"config schema"}


def commands(group, path=()):
    """(names, command) of every command that does something."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, (*path, name))
        else:
            yield " ".join((*path, name)), one


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", ALL)
def test_help_fits_80_columns_and_has_an_example_that_is_one(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, [*name.split(), "--help"])
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    epilog = ALL[name].epilog
    assert epilog.startswith(f"Example: kvkeep {name}")
    words = shlex.split(epilog.removeprefix(f"Example: kvkeep {name}"))
    known = {option for one in ALL[name].params for option in one.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("name", set(ALL) - NO_JSON)
def test_every_command_has_json(name):
    assert "--json" in {option for one in ALL[name].params for option in one.opts}


@pytest.mark.parametrize("name", ALL)
def test_every_command_is_in_the_document(name):
    assert f"kvkeep {name}" in DOCUMENT.read_text()


def test_the_list_of_commands_is_complete():
    done = CliRunner().invoke(app, ["--help"])
    assert all(name.split()[0] in done.stdout for name in ALL)
