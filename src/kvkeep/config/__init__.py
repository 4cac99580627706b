"""Settings: one typed, frozen tree, and how it is read from YAML, environment and extra config."""

from __future__ import annotations

from kvkeep.config.load import LoadedSettings, load_settings, resolve_settings
from kvkeep.config.settings import CpuSettings, IdentitySettings, LookupSettings, Settings

__all__ = [
    "CpuSettings",
    "IdentitySettings",
    "LoadedSettings",
    "LookupSettings",
    "Settings",
    "load_settings",
    "resolve_settings",
]
