"""Reads the settings: YAML file, then environment, then extra config; the later one wins.

Every key is checked against the tree, so that a misspelt one is an error that names the nearest
known one and where it came from. Nothing here reads the process's environment: the caller passes it
in. Called once, at the start.

What a message says about a wrong setting: what, where, and how to mend it. Pure functions.

pydantic finds what is wrong; its own words are for programmers, these are for whoever writes a
settings file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvkeep.config.settings import Settings
from kvkeep.errors import ConfigError

#: How a setting is written that is no plain value; in the environment, in YAML's short form.
FORMS = {
    "identity.tags": "a mapping like {team: a}",
    "cpu.numa": "auto, off or a map like {0: 0, 1: 1}",
    "plugins": "a list like [{name: mine, module: package.module:Class}]",
}
#: Settings that may hold secrets, so that no message shows their values.
SECRET = frozenset({"plugins", "metrics.token", "remote.url"})
#: Those that are URLs, of which all but the secrets in them may be shown.
MASKED = frozenset({"remote.url"})
#: By pattern, what it allows.
_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,179}$": "letters, digits, dots, dashes and underscores alone",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "letters, digits, dots, dashes and underscores alone",
    r"^[\w.]+:[\w.]+$": "a module and a class in it, like package.module:Class",
}


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given, and where."""

    value: object
    origin: str


def explain_errors(error: ValidationError, given: Mapping[str, Given], path: str = "") -> str:
    """One sentence per setting: which, from where, what was given and what is allowed.

    Args:
        error: what pydantic found.
        given: dotted name -> what was given.
        path: the setting, where only one was checked.
    """
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        place = ".".join(str(part) for part in problem["loc"])
        where = path or next((known for known in given if f"{place}.".startswith(f"{known}.")), "")
        text = _allowed(problem, where, place)
        if where:
            item = given[where]
            shown = place if where in SECRET else f"{where} = {item.value!r}"
            text = f"{shown} ({item.origin}): {text}"
        else:
            named = [f"{known} by {given[known].origin}" for known in given if known in text]
            text += f" [given: {', '.join(named)}]" if named else ""
        lines.setdefault(where or text, text)  # a union has a problem for each of its members
    return "; ".join(lines.values())


def nearest(name: str, known: Collection[str], sections: Collection[str]) -> str:
    """A hint at the known name that is nearest, or at all of them.

    Args:
        name: an unknown one.
        known: all names.
        sections: names of groups of settings.
    """
    for names, text in ((known, "{}"), (sections, "the section {}")):
        matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        if matches:
            return f"did you mean {text.format(matches[0])}?"
    tails = {full.rpartition(".")[2]: full for full in known}
    matches = difflib.get_close_matches(name.rpartition(".")[2], list(tails), n=1, cutoff=0.75)
    if matches:
        return f"did you mean {tails[matches[0]]}?"
    plain = ", ".join(one for one in known if "." not in one)
    return (
        f"known are {plain} and the sections {', '.join(sorted(sections))}; kvkeep config explain "
        "shows all, kvkeep config import translates a file of LMCache"
    )


def nearest_variable(name: str, known: Collection[str], prefix: str) -> str:
    """The same for a variable; ``prefix`` is what all have in common."""
    by_tail = {one.removeprefix(prefix): one for one in known}
    matches = difflib.get_close_matches(name.removeprefix(prefix), list(by_tail), n=1, cutoff=0.6)
    if matches:
        return f"did you mean {by_tail[matches[0]]}?"
    return (
        f"variables that start with {prefix} are settings; kvkeep config explain --json names all"
    )


def yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong with a YAML text, and in which line, in one line."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is no UTF-8"
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        hint = "; indent with spaces, not tabs" if "'\\t'" in str(error.problem) else ""
        return f"{where}{error.problem or error.context}{hint}"
    return " ".join(str(error).split())


def _allowed(problem: ErrorDetails, path: str, place: str) -> str:
    """What may stand in the place of what does."""
    context = problem.get("ctx", {})
    words: dict[str, Callable[[], str]] = {
        "string_pattern_mismatch": lambda: _pattern(str(context["pattern"])),
        "string_type": lambda: "write a text; YAML reads numbers and flags as such without quotes",
        "string_too_short": lambda: f"at least this long: {context['min_length']}",
        "int_type": lambda: "write a whole number, without quotes",
        "int_parsing": lambda: "write a whole number",
        "bool_type": lambda: "write true or false, without quotes",
        "bool_parsing": lambda: "write true or false",
        "path_type": lambda: "write one path",
        "finite_number": lambda: "write a finite number, like 5s",
        "extra_forbidden": lambda: f"there is no {place.rpartition('.')[2]} here",
        "greater_than": lambda: f"must be greater than {context['gt']}",
        "greater_than_equal": lambda: _at_least(context["ge"], problem["input"]),
        "less_than_equal": lambda: f"must be {context['le']} at most",
        "literal_error": lambda: f"write {context['expected']}",
    }
    if path in FORMS and problem["type"] in ("literal_error", "tuple_type", "missing"):
        return f"write {FORMS[path]}"
    if problem["type"] in words:
        return words[problem["type"]]()
    return problem["msg"].removeprefix("Value error, ")


def _at_least(bound: object, value: object) -> str:
    if bound == 4096 and isinstance(value, int):  # units.SMALLEST_SIZE_BYTES
        return f"that is {value} bytes, and at least 4096 are needed; write the unit, like 20GiB"
    return f"must be {bound} at least"


def _pattern(pattern: str) -> str:
    return f"write {_PATTERNS.get(pattern, f'what matches {pattern}')}"


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
