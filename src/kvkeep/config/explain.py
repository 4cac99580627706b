"""What every setting is, in one list: value, unit, meaning and origin; and its JSON schema.

For people and editors: ``kvkeep config`` shows it. Pure functions, callable from any thread.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvkeep.config.base import RemoteURL, Unit, format_duration, format_size
from kvkeep.config.load import MASKED, SECRET, LoadedSettings, env_name, setting_fields
from kvkeep.config.settings import PluginSettings, Settings

#: Where a setting that was not given has its value from.
DEFAULT_ORIGIN = "default"
#: Shown in place of what may be a secret.
HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class ExplainedSetting:
    """One setting.

    Attributes:
        name: dotted.
        value: as JSON has it: numbers in ``unit``, None where it is unset. What may be a secret is
            replaced by ``hidden``.
        text: the value as a person reads it, with its unit; ``unset`` where it is.
        unit: what a number counts: bytes, seconds, tokens, threads; empty where it is no number.
        meaning: what it does.
        origin: where the value was given, or ``default``.
        environment: its variable.
    """

    name: str
    value: object
    text: str
    unit: str
    meaning: str
    origin: str
    environment: str


def explain(loaded: LoadedSettings) -> list[ExplainedSetting]:
    """Every setting, in the order of the tree."""
    explained = []
    for name, field in setting_fields():
        value: object = loaded.settings
        for part in name.split("."):
            value = getattr(value, part)
        unit = next(_units((*field.metadata, field.annotation)), "")
        if name in MASKED and isinstance(value, str):
            value = RemoteURL.parse(value).masked
        plain = _plain(value, secret=name in SECRET - MASKED)
        explained.append(
            ExplainedSetting(
                name=name,
                value=plain,
                text=_text(plain, unit),
                unit=unit,
                meaning=field.description or "",
                origin=loaded.origins.get(name, DEFAULT_ORIGIN),
                environment=env_name(name),
            )
        )
    return explained


def json_schema() -> dict[str, object]:
    """A JSON schema (2020-12) of the YAML file in its nested form, for editors."""
    schema = Settings.model_json_schema()
    for name, place in schema["properties"].items():
        if "$ref" in place:  # an empty section is allowed
            reference = {"$ref": place.pop("$ref")}
            schema["properties"][name] = {"anyOf": [reference, {"type": "null"}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Settings of kvkeep",
    }


def _units(parts: typing.Iterable[object]) -> Iterator[str]:
    """Names of the units in an annotation, however deep they are."""
    for part in parts:
        if isinstance(part, Unit):
            yield part.name
        else:
            yield from _units(typing.get_args(part))


def _plain(value: object, *, secret: bool) -> object:
    """A value as JSON can hold it."""
    if secret and isinstance(value, str):
        return HIDDEN
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, PluginSettings):
        plain = value.model_dump(exclude_none=True)
        if secret and value.settings:
            plain["settings"] = dict.fromkeys(value.settings, HIDDEN)
        return plain
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # tags, nodes
        return {str(key): item for key, item in value}
    if isinstance(value, tuple):
        return [_plain(item, secret=secret) for item in value] or None
    return value


def _text(value: object, unit: str) -> str:
    """A plain value as a person reads it."""
    if value is None or isinstance(value, bool):
        return "unset" if value is None else str(value).lower()
    if unit == "bytes" and isinstance(value, int):
        return format_size(value)
    if unit == "seconds" and isinstance(value, float):
        return format_duration(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(item, '')}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_text(item, "") for item in value) + "]"
    return f"{value} {unit}".strip()
