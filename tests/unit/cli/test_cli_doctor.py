"""``kvkeep doctor``: the page, JSON and exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app

MODEL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "float32",
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "sockets").mkdir()

    def invoke(*arguments, **settings):
        values = {"cpu.size": "64MiB", "lookup.socket_dir": str(tmp_path / "sockets"), **settings}
        return CliRunner().invoke(
            app,
            ["doctor", "--model", str(tmp_path), "--extra", json.dumps(values), *arguments],
        )

    return invoke


def test_the_page_fits_80_columns_and_ends_with_what_to_change(run):
    done = run()
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for heading in ("machine", "memory", "software", "model", "disk", "remote", "engine"):
        assert heading in lines
    changes = lines[lines.index("what to change") :]
    assert "      disk.path: /var/cache/kvkeep" in changes
    assert lines[-1].startswith("All is well")


def test_json_says_the_same(run):
    done = run("--json")
    assert done.exit_code == 0
    values = json.loads(done.stdout)
    assert values["verdict"] == "note"
    [chunk] = [one for one in values["sections"]["model"] if one["topic"] == "chunk"]
    assert (chunk["tokens"], chunk["bytes"]) == (256, 256 * 2 * 2 * 2 * 16 * 4)
    assert "disk.path: /var/cache/kvkeep" in [change["line"] for change in values["changes"]]


def test_a_warning_is_1_and_an_error_is_2(run, tmp_path):
    disk = {"disk.path": str(tmp_path / "d"), "disk.size": "900TiB"}
    done = run(**disk)
    assert (done.exit_code, done.stdout.splitlines()[-1][:8]) == (1, "It works")
    done = run(**disk, **{"cpu.size": "900TiB"})
    assert done.exit_code == 2
    lines = done.stdout.splitlines()
    changes = lines[lines.index("what to change") + 1 :]
    assert changes[0].startswith("  1 Make the pool smaller")  # the error before the warning


def test_wrong_settings_are_one_message_and_2(run):
    done = run(**{"cpu.sise": "1GiB"})
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "did you mean cpu.size?" in done.stderr
