"""``kvkeep config``: screens, JSON, exit codes."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.config import load_settings


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("KVKEEP_CONFIG", raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["config", *map(str, arguments)])


def test_explain_shows_value_meaning_and_origin(run, monkeypatch, tmp_path):
    path = tmp_path / "kvkeep.yaml"
    path.write_text("lookup: {timeout: 500ms}")
    monkeypatch.setenv("KVKEEP_CHUNK_SIZE", "64")
    done = run("explain", "--config", path, "--extra", '{"cpu": {"size": "20GiB"}}')
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "chunk_size = 64 tokens environment variable KVKEEP_CHUNK_SIZE" in lines
    assert "cpu.size = 20GiB --extra" in lines
    assert "cpu.reserve = unset (bytes) default" in lines
    assert "Order of eviction from the disk." in lines
    assert str(path) in done.stdout.replace("\n", "")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_explain_can_leave_out_defaults(run):
    done = run("explain", "--changed", "--extra", '{"cpu.size": "20GiB"}', "--json")
    [item] = json.loads(done.stdout)
    assert (item["name"], item["value"], item["unit"]) == ("cpu.size", 20 << 30, "bytes")
    assert item["origin"] == "--extra"
    done = run("explain", "--changed")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "every setting has its default\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--extra", "{"], "--extra is no JSON"),
        (["--extra", "[1]"], "must be a JSON object"),
        (["--extra", '{"cpu.sise": 1}'], "did you mean cpu.size?"),
        (["--extra", '{"cpu.size": "20"}'], "write a size with its unit"),
        (["--config", "/no/such.yaml"], "cannot read the settings file /no/such.yaml"),
        (["--config", "/"], "cannot read the settings file /"),
    ],
)
def test_what_is_wrong_is_one_message_and_2(run, arguments, words):
    done = run("explain", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_variable_is_named(run, monkeypatch):
    monkeypatch.setenv("KVKEEP_CPU_SISE", "1")
    done = run("explain")
    assert (done.exit_code, "did you mean KVKEEP_CPU_SIZE?" in done.stderr) == (2, True)


def test_schema_is_a_schema(run):
    done = run("schema")
    assert done.exit_code == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(done.stdout))


def test_import_prints_yaml_that_kvkeep_reads(run, tmp_path):
    path = tmp_path / "lmcache.yaml"
    path.write_text("max_local_cpu_size: 20\nlocal_disk: file:///d/\nenable_p2p: false\n")
    done = run("import", path)
    assert done.exit_code == 0
    (tmp_path / "new.yaml").write_text(done.stdout)
    settings = load_settings(yaml_path=tmp_path / "new.yaml")
    assert (settings.cpu.size, str(settings.disk.path)) == (20 << 30, "/d")
    assert "enable_p2p: switched off" in done.stderr
    assert "Every key was translated" in done.stderr


def test_import_says_what_has_no_counterpart_and_ends_with_1(run, tmp_path):
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 128\nenable_p2p: true\n")
    done = run("import", path)
    assert done.exit_code == 1
    assert yaml.safe_load(done.stdout) == {"chunk_size": 128}
    assert "enable_p2p: KV is not sent from engine to engine" in done.stderr
    as_json = run("import", path, "--json")
    values = json.loads(as_json.stdout)
    assert as_json.exit_code == 1
    assert values["settings"] == {"chunk_size": 128}
    assert [note["fate"] for note in values["notes"]] == ["taken", "no_counterpart"]


def test_import_of_nothing_prints_nothing(run, tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    done = run("import", tmp_path / "empty.yaml")
    assert (done.exit_code, done.stdout) == (0, "")


@pytest.mark.parametrize("name, words", [("missing.yaml", "cannot read"), ("bad.yaml", "chunk")])
def test_import_of_what_is_no_good_ends_with_2(run, tmp_path, name, words):
    (tmp_path / "bad.yaml").write_text("chunk_size: x")
    done = run("import", tmp_path / name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.parametrize("command", ["explain", "schema", "import"])
def test_help_has_an_example(run, command):
    done = run(command, "--help")
    assert done.exit_code == 0
    assert f"Example: kvkeep config {command}" in done.stdout
