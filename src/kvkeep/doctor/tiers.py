"""Plugins, and the directory of the lookup sockets: can they be used?"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvkeep.backends.plugins import find_plugin
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe
from kvkeep.errors import ConfigError, LookupServiceError
from kvkeep.lookup.paths import check_private, is_listened_on, socket_directory, socket_path


def sockets(patient: Patient) -> Sequence[Finding]:
    """Where workers make their sockets: there, private, and short enough."""
    directory = socket_directory(patient.settings.lookup.socket_dir, patient.env)
    advice = Advice(
        "Name a short directory that this user may write.", "lookup.socket_dir: /run/user/1000"
    )
    try:
        socket_path(directory, "engine", 0)
        if directory.exists() or directory.is_symlink():
            check_private(directory)
    except LookupServiceError as error:
        return [Finding("sockets", str(error), Level.ERROR, advice)]
    base = directory if directory.exists() else directory.parent
    while not base.exists():
        base = base.parent
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        text = f"{base} may not be written by this user"
        return [Finding("sockets", text, Level.ERROR, advice)]
    found = directory.glob("*.sock") if directory.exists() else ()
    count = sum(1 for path in found if is_listened_on(path))
    running = {0: "no engine runs", 1: "1 worker answers"}.get(count, f"{count} workers answer")
    return [Finding("sockets", f"{directory}, {running}", values={"sockets": count})]


def plugins(patient: Patient) -> Sequence[Finding]:
    """Whether each plugin's class is found; it is not built."""
    findings = []
    for plugin in patient.settings.plugins:
        try:
            found = find_plugin(plugin)
        except ConfigError as error:
            advice = Advice(f"Mend or remove the plugin {plugin.name}.")
            findings.append(Finding(plugin.name, str(error), Level.ERROR, advice))
        else:
            findings.append(Finding(plugin.name, f"plugin {found.__qualname__}, found"))
    return findings


TIER_PROBES = (
    Probe("engine", "sockets", sockets),
    Probe("engine", "plugins", plugins, deadline_s=20.0),
)
