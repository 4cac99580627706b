"""What a message says about a wrong setting: what, where, and how to mend it. Pure functions.

pydantic finds what is wrong; its own words are for programmers, these are for whoever writes a
settings file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

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
