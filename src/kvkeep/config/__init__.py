"""Settings: one typed, frozen tree, and how it is read from YAML, environment and extra config."""

from __future__ import annotations

from kvkeep.config.load import LoadedSettings, load_settings, resolve_settings
from kvkeep.config.settings import (
    CpuSettings,
    DiskSettings,
    HealthSettings,
    IdentitySettings,
    LogSettings,
    LookupSettings,
    MetricsSettings,
    PluginSettings,
    Settings,
    TracingSettings,
)

__all__ = [
    "CpuSettings",
    "DiskSettings",
    "HealthSettings",
    "IdentitySettings",
    "LoadedSettings",
    "LogSettings",
    "LookupSettings",
    "MetricsSettings",
    "PluginSettings",
    "Settings",
    "TracingSettings",
    "load_settings",
    "resolve_settings",
]
