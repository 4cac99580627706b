"""The list of settings and their schema: complete, without secrets, and true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.config import load_settings, resolve_settings
from kvkeep.config.base import format_duration, format_size, parse_duration, parse_size
from kvkeep.config.explain import explain, json_schema
from kvkeep.config.load import setting_fields
from kvkeep.errors import ConfigError

ROOT = Path(__file__).parents[3]


def by_name(**sources):
    return {item.name: item for item in explain(resolve_settings(**sources))}


def test_every_setting_is_there_with_a_meaning():
    items = by_name()
    assert list(items) == [name for name, _ in setting_fields()]
    assert all(item.meaning and item.origin == "default" for item in items.values())


def test_values_have_units_and_origins(tmp_path):
    path = tmp_path / "kvkeep.yaml"
    path.write_text("cpu: {size: 20GiB, numa: {0: 1}}\nidentity: {tags: {team: a}}\n")
    items = by_name(
        yaml_path=path,
        env={"KVKEEP_LOOKUP_TIMEOUT": "500ms", "KVKEEP_CPU_HUGE_PAGES": "false"},
        extra={"disk.path": "/d"},
    )
    size, timeout = items["cpu.size"], items["lookup.timeout"]
    assert (size.value, size.text, size.unit, size.origin) == (
        20 << 30,
        "20GiB",
        "bytes",
        str(path),
    )
    assert (timeout.value, timeout.text, timeout.unit) == (0.5, "500ms", "seconds")
    assert timeout.origin == f"environment variable {timeout.environment}"
    assert (items["disk.path"].value, items["disk.path"].origin) == ("/d", "extra config")
    assert items["cpu.numa"].text == "{0: 1}"
    assert items["identity.tags"].value == {"team": "a"}
    assert items["cpu.huge_pages"].text == "false"
    assert (items["chunk_size"].text, items["chunk_size"].unit) == ("256 tokens", "tokens")
    assert (items["cpu.reserve"].value, items["cpu.reserve"].text) == (None, "unset")
    assert items["cpu.reserve"].unit == "bytes"
    assert items["disk.threads"].unit == "threads"
    json.dumps([item.value for item in items.values()])


def test_what_plugins_are_given_is_hidden():
    plugins = [{"name": "far", "module": "a.b:C", "settings": {"token": "hunter2"}}]
    item = by_name(extra={"plugins": plugins})["plugins"]
    assert "hunter2" not in repr(item)
    assert item.value == [{"name": "far", "module": "a.b:C", "settings": {"token": "hidden"}}]


@given(st.integers(0, 1 << 53))
def test_sizes_are_written_as_they_are_read(size):
    assert parse_size(format_size(size)) == size


@given(st.floats(1e-6, 1e6))
def test_durations_are_written_as_they_are_read(seconds):
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    "seconds, text", [(300.0, "300s"), (0.5, "500ms"), (0.00025, "250us"), (1.5, "1.5s")]
)
def test_durations_are_short(seconds, text):
    assert format_duration(seconds) == text


GOOD = [
    "{}",
    "cpu:",
    "cpu: {size: 20GiB, policy: LRU, numa: off, prefault: 0B, alloc_timeout: 0.5}",
    "cpu: {size: 5 gb, numa: {0: 0, '1': 1}}",
    "disk: {path: /d, size: 1073741824, load_timeout: 2min}",
    "identity: {tags: {team: search}, model: m}",
    "plugins: [{name: far, module: 'a.b:C', settings: {url: x}}]",
]
BAD = [
    "cpu: {sise: 20GiB}",
    "cpu: {size: 20}",
    "cpu: {size: 20 parsecs}",
    "cpu: {numa: sideways}",
    "cpu: {numa: {a: 0}}",
    "cpu: {policy: best}",
    "lookup: {timeout: 0}",
    "lookup: {timeout: 5}\nchunk_size: many",
    "identity: {tags: [a]}",
    "plugins: [{name: '!', module: 'a.b:C'}]",
    "disk: {threads: 1, path: /d}",
]
DOCUMENTED = re.findall(
    r"^```yaml\n(.*?)^```",
    (ROOT / "docs" / "configuration.md").read_text() + (ROOT / "docs" / "disk.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def as_an_editor_reads(text):
    """Names of a mapping are texts there, also those that are numbers in YAML."""
    return json.loads(json.dumps(yaml.safe_load(text)))


@pytest.mark.parametrize("text", [*GOOD, *DOCUMENTED])
def test_the_schema_accepts_what_kvkeep_accepts(text, tmp_path):
    (tmp_path / "f.yaml").write_text(text)
    load_settings(yaml_path=tmp_path / "f.yaml")
    jsonschema.Draft202012Validator(json_schema()).validate(as_an_editor_reads(text))


@pytest.mark.parametrize("text", BAD)
def test_the_schema_refuses_what_kvkeep_refuses(text, tmp_path):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_settings(yaml_path=tmp_path / "f.yaml")
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(as_an_editor_reads(text))


def test_the_schema_is_one_and_describes_every_setting():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(schema)
    for name, field in setting_fields():
        assert json.dumps(field.description)[1:-1] in text, name
