"""The documents' code blocks are run, and their worked examples computed, not believed."""

from __future__ import annotations

import ast
import hashlib
import html
import json
import re
import shlex
import struct
from pathlib import Path

import pytest
import typer

from kvkeep.cli.main import app
from kvkeep.config import load_settings
from kvkeep.config.load import setting_fields
from kvkeep.doctor.base import Patient
from kvkeep.doctor.examination import PROBES
from kvkeep.metrics.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(*languages: str, folder: str = "") -> list:
    return [
        pytest.param(text, id=f"{path.relative_to(ROOT)}-{number}")
        for path in DOCUMENTS
        if path.relative_to(ROOT).as_posix().startswith(folder)
        for number, (language, text) in enumerate(_BLOCK.findall(path.read_text()))
        if language in languages
    ]


@pytest.mark.parametrize("text", blocks("python"))
def test_python_blocks_are_python_and_import_what_exists(text):
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvkeep"):
            module = pytest.importorskip(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("text", blocks("python", folder="docs/configuration"))
def test_python_blocks_about_settings_run(text):
    exec(compile(text, "configuration.md", "exec"), {})


def test_the_settings_of_the_start_with_transformers_run():
    """The other blocks of both starts run in tests/engine, with a real model."""
    (text,) = [text for text in python_blocks("start-transformers.md") if "Settings(" in text]
    exec(compile(text, "start-transformers.md", "exec"), {})


def python_blocks(name: str) -> list[str]:
    found = _BLOCK.findall((ROOT / "docs" / name).read_text())
    return [text for language, text in found if language == "python"]


def test_metrics_in_prose_are_metrics():
    known = {"kvkeep_", *CATALOGUE}
    for spec in CATALOGUE.values():
        known |= {spec.exposed_name, *(f"{spec.name}_{end}" for end in ("bucket", "sum", "count"))}
    for path in DOCUMENTS:
        for name in re.findall(r"\bkvkeep_[a-z_]+(?![a-z_*])", path.read_text()):
            is_start = any(other.startswith(name) for other in known)  # grep kvkeep_lookup
            assert name in known or is_start, f"{path.name}: there is no metric {name}"


def test_settings_in_prose_are_settings():
    names = {name for name, _ in setting_fields()}
    sections = {name.partition(".")[0] for name in names if "." in name}
    for path in DOCUMENTS:
        if path.name == "CHANGELOG.md" or path.parent.name == "adr":
            continue  # these speak of their time
        for name in re.findall(r"`([a-z]+\.[a-z_]+)(?::[^`]*)?`", path.read_text()):
            section, _, last = name.partition(".")
            if section in sections and last not in ("py", "md", "json", "yaml"):
                assert name in names, f"{path.name}: there is no setting {name}"


COMMANDS = [
    pytest.param(line.split(" #")[0], id=f"{path.name}-{line[:50]}")
    for path in DOCUMENTS
    for line in re.findall(r"^(?:    |\$ )kvkeep (.+)$", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_in_the_documents_have_these_options(line):
    words = shlex.split(line.split(" > ")[0].split(" | ")[0])
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not getattr(command, "commands", {}), f"{line}: no such command"
    known = {name for param in command.params for name in param.opts} | {"--help"}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= known


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_settings(text, tmp_path):
    path = tmp_path / "kvkeep.yaml"
    path.write_text(text)
    assert load_settings(yaml_path=path) != load_settings()


@pytest.mark.parametrize("text", blocks("json"))
def test_json_blocks_are_transfer_configs_with_known_settings(text):
    config = json.loads(text)
    assert config["kv_connector"] == "KVKeepConnector"
    assert load_settings(extra=config["kv_connector_extra_config"]) != load_settings()


def test_the_command_for_vllm_holds_a_transfer_config():
    found = re.search(r"--kv-transfer-config \\\n\s+'(\{.*?\})'", (ROOT / "README.md").read_text())
    assert json.loads(found[1]) == {
        "kv_connector": "KVKeepConnector",
        "kv_connector_module_path": "kvkeep.connectors.vllm",
        "kv_role": "kv_both",
    }


def test_the_extra_configs_in_prose_are_settings():
    text = (ROOT / "README.md").read_text()
    for found in re.findall(r'"kv_connector_extra_config": (\{.*?\})', text):
        assert load_settings(extra=json.loads(found)) != load_settings()


@pytest.mark.parametrize("text", blocks("console"))
def test_console_blocks_name_targets_of_the_makefile(text):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$ make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_worked_example_of_the_key_chain():
    """docs/formats.md 1.5, computed from its own text with nothing but SHA-256."""
    text = (ROOT / "docs" / "formats.md").read_text()
    example = text[text.index("### 1.5") : text.index("## 2 ")]
    values = dict(re.findall(r"^(root|chunk \d|key\(\d\)) +([0-9a-f ]+)$", example, re.MULTILINE))
    lines = re.search(r"^encoded +(.*?)^root", example, re.MULTILINE | re.DOTALL)[1].splitlines()
    encoded = "".join(line.removeprefix(" " * 10) for line in lines)
    root = hashlib.sha256(b"kvkeep root\0" + encoded.encode()).digest()
    assert root.hex() == values["root"]
    parent = root
    for number in range(2):
        ids = struct.pack("<4I", *range(4 * number, 4 * number + 4))
        assert ids.hex(" ", 4) == values[f"chunk {number}"]
        parent = hashlib.sha256(parent + ids).digest()
        assert parent.hex() == values[f"key({number})"]
    golden = json.loads((ROOT / "tests" / "golden" / "keys.json").read_text())["cases"][0]
    assert golden["expect"]["encoded"] == encoded
    assert golden["expect"]["keys"] == [values["key(0)"], values["key(1)"]]


def test_the_picture_of_the_doctor_has_every_line_that_it_prints_now():
    """Of this machine: what depends on the settings is in the picture's own."""
    picture = (ROOT / "docs" / "images" / "doctor.svg").read_text()
    words = html.unescape("".join(re.findall(r"<text[^>]*>(.*?)</text>", picture)))
    patient = Patient(load_settings(), {}, None)
    for probe in PROBES:
        if probe.section in ("machine", "memory", "software"):
            for finding in probe.run(patient):
                assert finding.topic.replace(" ", "\xa0") in words
