"""``kvkeep bench``: every row, the table, JSON, and nothing that stays. Not how fast."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app

ROWS = ("keys of", "lookup,", "with pin", "store, ", "load, ", "disk: write", "disk: read")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command, with few repeats and small sizes."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("kvkeep.cli.bench._REPEATS", 1)
    monkeypatch.setattr("kvkeep.cli.bench._DISK_ROUNDS", 1)
    monkeypatch.setattr("kvkeep.bench.engine.NUM_TOKENS", 4096)
    return lambda *arguments: CliRunner().invoke(
        app, ["bench", "--dir", str(tmp_path), "--size", "64MiB", *arguments]
    )


def test_the_table_has_every_row_in_80_columns_and_nothing_stays(run, tmp_path):
    done = run()
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for row in ROWS:
        assert any(line.startswith(row) for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_json_has_rows_and_machine_and_the_store_is_measured_and_left_as_it_was(run, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    done = run("--json", "--extra", json.dumps({"remote.url": f"file://{store}"}))
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert values["machine"]["cores"] >= 1
    rows = {row["what"]: row for row in values["rows"]}
    assert {"remote: one ping", "remote: put, 8 MiB chunks", "disk: read, 8 MiB chunks"} <= set(
        rows
    )
    assert all(row["kvkeep"] > 0 and row["limit"] > 0 for row in rows.values())
    assert [
        path for path in store.rglob("*") if path.is_file() and path.stat().st_size > 4096
    ] == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--size", "1MiB"], "--size '1MiB': must be at least 64.0 MiB"),
        (["--size", "big"], "--size 'big': write a size with its unit"),
        (["--dir", "/no/such"], "/no/such is no directory"),
        (["--extra", '{"remote.url": "redis://127.0.0.1:9/0"}'], "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_measured_is_one_message_and_2(run, arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
