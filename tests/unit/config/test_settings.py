"""The tree of settings: frozen, with units, checked together, and nothing in it without effect."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvkeep
from kvkeep.config import LookupSettings, Settings, load_settings
from kvkeep.config.base import parse_duration, parse_size
from kvkeep.config.load import setting_fields
from kvkeep.errors import ConfigError

SOURCE = Path(kvkeep.__file__).parent


def test_settings_are_frozen_and_closed():
    settings = Settings()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        settings.chunk_size = 1
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        settings.cpu.size = 1
    with pytest.raises(pydantic.ValidationError, match="Extra inputs"):
        Settings(chunksize=1)
    assert hash(Settings()) == hash(settings)


def test_every_setting_is_described():
    for path, info in setting_fields():
        assert info.description, path


def test_an_option_that_works_against_another_one_is_an_error():
    """Fault 46: two settings that cannot both be meant are told at the start, by name."""
    with pytest.raises(
        ConfigError, match=r"lookup\.lease .* longer than lookup\.timeout"
    ) as caught:
        load_settings(env={"KVKEEP_LOOKUP_LEASE": "500ms"})
    assert "KVKEEP_LOOKUP_LEASE" in str(caught.value)
    assert LookupSettings(timeout=0.1, lease=0.2).lease == 0.2


def reads(tree: ast.AST) -> set[tuple[str, str]]:
    """(section, name) of every attribute that is read off something named like a section."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            found.add((owner.lstrip("_"), node.attr))
    return found


def test_no_setting_is_without_effect():
    """Fault 46: every setting is read, as ``SECTION.NAME``, somewhere outside of config/."""
    read: set[tuple[str, str]] = set()
    for path in SOURCE.rglob("*.py"):
        if "config" not in path.relative_to(SOURCE).parts:
            read |= reads(ast.parse(path.read_text()))
    unread = []
    for path, _ in setting_fields():
        section, _, name = path.rpartition(".")
        if (section or "settings", name) not in read:
            unread.append(path)
    assert unread == []


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GiB", 20 << 30),
        ("5 GB", 5 * 10**9),
        ("1.5MiB", 3 << 19),
        ("512mib", 512 << 20),
        ("4096B", 4096),
        (" 1TiB ", 1 << 40),
        (4096, 4096),
    ],
)
def test_sizes_are_written_with_units(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "5", "GiB", "5 G i B", "5bits", "1e3MB", "٣GB", 5.0, True])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="unit"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("5s", 5), ("2min", 120), ("1.5h", 5400), ("10 us", 1e-5), (3, 3.0)],
)
def test_durations_are_written_with_units(text, seconds):
    assert math.isclose(parse_duration(text), seconds)


@pytest.mark.parametrize("text", ["", "5", "ms", "5 m", "-5s", "1e3s", "٣s", True, None])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="unit"):
        parse_duration(text)


@given(st.integers(1, 10**6), st.sampled_from(["KiB", "MiB", "GiB", "KB", "MB", "GB"]))
def test_sizes_are_exact(number, unit):
    base = 1024 if "i" in unit else 1000
    assert parse_size(f"{number}{unit}") == number * base ** ("KMG".index(unit[0]) + 1)
