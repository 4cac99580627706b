"""Reads the settings: YAML file, then environment, then extra config; the later one wins.

Every key is checked against the tree, so that a misspelt one is an error that names the nearest
known one and where it came from. Nothing here reads the process's environment: the caller passes it
in. Called once, at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from kvkeep.config.settings import Settings
from kvkeep.config.wording import (
    FORMS,
    SECRET,
    Given,
    explain_errors,
    nearest,
    nearest_variable,
    yaml_problem,
)
from kvkeep.errors import ConfigError

#: Environment variables with this prefix are kvkeep's; an unknown one is an error.
ENV_PREFIX = "KVKEEP_"
#: Names the YAML file, where the caller names none.
ENV_CONFIG = "KVKEEP_CONFIG"
#: Variables that are no settings: the YAML file, and the folder of the demo's model.
ENV_OTHER = frozenset({ENV_CONFIG, "KVKEEP_MODEL_DIR"})
#: Prefixes of variables that only the tests read.
ENV_TEST_PREFIXES = ("KVKEEP_TEST_", "KVKEEP_STRESS_", "KVKEEP_STALL_", "KVKEEP_FUZZ_")


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings and where each came from.

    Attributes:
        settings: the checked tree.
        origins: dotted name -> where the value was given; a name that is missing has its default.
    """

    settings: Settings
    origins: Mapping[str, str]


def load_settings(
    *,
    yaml_path: Path | None = None,
    env: Mapping[str, str] | None = None,
    extra: Mapping[str, object] | None = None,
) -> Settings:
    """The settings alone; see :func:`resolve_settings`."""
    return resolve_settings(yaml_path=yaml_path, env=env, extra=extra).settings


def resolve_settings(
    *,
    yaml_path: Path | None = None,
    env: Mapping[str, str] | None = None,
    extra: Mapping[str, object] | None = None,
    extra_origin: str = "extra config",
) -> LoadedSettings:
    """Read, merge and check all settings.

    Args:
        yaml_path: a YAML file; None takes the one that ``KVKEEP_CONFIG`` in ``env`` names, if any.
        env: environment variables; only those that start with ``KVKEEP_`` matter. None for none.
        extra: the engine's extra config, nested (``{"cpu": {"size": ...}}``) or dotted
            (``{"cpu.size": ...}``). The strongest.
        extra_origin: what messages call the origin of ``extra``.

    Raises:
        ConfigError: a file cannot be read, a key is unknown or given twice, a value is malformed,
            or two values contradict each other.
    """
    env = env or {}
    if yaml_path is None and env.get(ENV_CONFIG):
        yaml_path = Path(env[ENV_CONFIG])
    given: dict[str, Given] = {}
    if yaml_path is not None:
        given.update(_flatten(read_yaml(yaml_path), str(yaml_path)))
    given.update(_from_env(env))
    given.update(_flatten(extra or {}, extra_origin))
    return LoadedSettings(
        settings=_build(given), origins={path: item.origin for path, item in given.items()}
    )


def setting_fields(
    model: type[BaseModel] = Settings, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """(dotted name, field) of every setting, in the order of the tree."""
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from setting_fields(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info


def env_name(path: str) -> str:
    """The environment variable of a setting: ``cpu.size`` is ``KVKEEP_CPU_SIZE``."""
    return ENV_PREFIX + path.replace(".", "_").upper()


_FIELDS: dict[str, FieldInfo] = dict(setting_fields())
_SECTIONS = {path.rpartition(".")[0] for path in _FIELDS} - {""}
_ENV_NAMES = {env_name(path): path for path in _FIELDS}


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice; YAML itself would let the later one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See yaml; checks the keys first."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node.value, str) and key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key_node.value!r} is given twice", key_node.start_mark
                )
            if isinstance(key_node.value, str):
                seen.add(key_node.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _parse_yaml(text: str) -> object:
    """The content of a YAML text.

    Raises:
        YAMLError: it is none; also where the library itself lets another error through.
    """
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise yaml.YAMLError(f"a value in it cannot be read: {error}") from error


def read_yaml(path: Path) -> Mapping[str, object]:
    """The top mapping of a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    try:
        content = _parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the settings file {path} is no valid YAML: {yaml_problem(error)}"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the settings file {path} must be a mapping of names to values")
    return content


def _flatten(tree: Mapping[str, object], origin: str, prefix: str = "") -> dict[str, Given]:
    """Dotted names of a nested mapping's values; None in place of a section is an empty one."""
    flat: dict[str, Given] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if path in _FIELDS:
            found = {path: Given(value, origin)}
        elif path in _SECTIONS and (value is None or isinstance(value, Mapping)):
            found = _flatten(value or {}, origin, f"{path}.")
        elif path in _SECTIONS:
            raise ConfigError(
                f"{path} in {origin} is a section, not a value; it holds "
                + ", ".join(known for known in _FIELDS if known.startswith(f"{path}."))
            )
        else:
            raise ConfigError(
                f"unknown setting {path} in {origin}; {nearest(path, _FIELDS, _SECTIONS)}"
            )
        for twice in flat.keys() & found.keys():
            raise ConfigError(f"{twice} is given twice in {origin}, nested and dotted")
        flat.update(found)
    return flat


def _from_env(env: Mapping[str, str]) -> dict[str, Given]:
    """Values of the KVKEEP_ variables, read as the type of their setting."""
    flat: dict[str, Given] = {}
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in ENV_OTHER:
            continue
        if name.startswith(ENV_TEST_PREFIXES):
            continue
        path = _ENV_NAMES.get(name)
        if path is None:
            raise ConfigError(
                f"unknown setting {name} in the environment; "
                + nearest_variable(name, [*_ENV_NAMES, *sorted(ENV_OTHER)], ENV_PREFIX)
            )
        origin = f"environment variable {name}"
        flat[path] = Given(_read_text(path, env[name], origin), origin)
    return flat


def _read_text(path: str, text: str, origin: str) -> object:
    """A setting's value from a text: numbers and flags as they are, lists and mappings as YAML."""
    info = _FIELDS[path]
    if path in FORMS:
        try:
            value = _parse_yaml(text)
        except yaml.YAMLError as error:
            cause = None if path in SECRET else error  # which would quote the text
            raise ConfigError(f"{path} ({origin}) is not {FORMS[path]}") from cause
        return text if isinstance(value, bool) else value  # YAML reads off as False
    adapter: TypeAdapter[object] = TypeAdapter(
        info.rebuild_annotation(), config=ConfigDict(strict=True)
    )
    try:
        return adapter.validate_strings(text)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, {path: Given(text, origin)}, path)) from error


def _build(given: Mapping[str, Given]) -> Settings:
    """Check the merged values as a tree."""
    tree: dict[str, Any] = {}
    for path, item in given.items():
        *sections, name = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = item.value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, given)) from error
