"""Plugins: tiers that somebody else wrote, found by entry point or by module path.

Called once per plugin, when a worker is set up. Whatever is wrong with a plugin is a ConfigError
that says which one, what, and how to mend it; messages never show a plugin's own settings.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
from collections.abc import Callable, Collection

from kvkeep.backends.base import (
    AllocatorBackendInterface,
    StorageBackendInterface,
    StoragePluginInterface,
)
from kvkeep.config.settings import PluginSettings
from kvkeep.errors import ConfigError

#: Entry points of this group are plugins.
ENTRY_POINT_GROUP = "kvkeep.backends"


def build_plugin(
    plugin: PluginSettings,
    allocator_backend: AllocatorBackendInterface,
    *,
    taken: Collection[str],
) -> StorageBackendInterface:
    """Find, build and name a plugin's tier.

    Args:
        plugin: its settings.
        allocator_backend: the backend whose memory it reads from and fills.
        taken: names that other tiers have.

    Raises:
        ConfigError: the plugin cannot be found, is none, or cannot be built.
    """
    if plugin.name in taken:
        raise ConfigError(
            f"plugin {plugin.name}: another tier has this name; choose one that is not among "
            + ", ".join(taken)
        )
    found = find_plugin(plugin)
    try:
        backend = found.from_settings(copy.deepcopy(plugin.settings), allocator_backend)
    except ConfigError as error:
        raise ConfigError(f"plugin {plugin.name}: {error}") from error
    except Exception as error:  # here other people's code begins
        raise ConfigError(
            f"plugin {plugin.name}: {found.__qualname__}.from_settings raised "
            f"{type(error).__name__}; see the exception that this one names as its cause"
        ) from error
    if not isinstance(backend, StorageBackendInterface):
        raise ConfigError(
            f"plugin {plugin.name}: {found.__qualname__}.from_settings returned {_kind(backend)}; "
            "it must return the backend"
        )
    backend.name = plugin.name
    return backend


def find_plugin(plugin: PluginSettings) -> type[StoragePluginInterface]:
    """The class of a plugin, which is not built.

    Raises:
        ConfigError: it cannot be found, or is none.
    """
    found = _find(plugin)
    if not isinstance(found, type) or not issubclass(found, StoragePluginInterface):
        raise ConfigError(
            f"plugin {plugin.name}: {_source(plugin)} is {_kind(found)}; it must be a class that "
            "derives from kvkeep.backends.base.StoragePluginInterface"
        )
    if found.__abstractmethods__:
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"plugin {plugin.name}: {_source(plugin)} has no {missing}; write them")
    return found


def _find(plugin: PluginSettings) -> object:
    """What the settings name: a class, if they are right."""
    if plugin.module is not None:
        return _find_in_module(plugin, plugin.module)
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    chosen = [point for point in points if point.name == plugin.entry_point]
    if not chosen:
        known = ", ".join(sorted({point.name for point in points})) or "none"
        raise ConfigError(
            f"plugin {plugin.name}: no installed package has the entry point {plugin.entry_point} "
            f"in the group {ENTRY_POINT_GROUP} (there: {known}); install its package into this "
            "environment"
        )
    values = {point.value for point in chosen}
    if len(values) > 1:
        raise ConfigError(
            f"plugin {plugin.name}: several packages have the entry point {plugin.entry_point}: "
            f"{', '.join(sorted(values))}; name the class by module instead"
        )
    return _load(plugin, chosen[0].load)


def _find_in_module(plugin: PluginSettings, path: str) -> object:
    module_name, _, attributes = path.partition(":")
    found: object = _load(plugin, lambda: importlib.import_module(module_name))
    for name in attributes.split("."):
        if not hasattr(found, name):
            raise ConfigError(
                f"plugin {plugin.name}: module {module_name} was found, {attributes} was not in it"
            )
        found = getattr(found, name)
    return found


def _load(plugin: PluginSettings, load: Callable[[], object]) -> object:
    try:
        return load()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"plugin {plugin.name}: {_source(plugin)} needs module {error.name}, which is not "
            "installed; install it into this environment, or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:  # here other people's code begins
        raise ConfigError(
            f"plugin {plugin.name}: importing {_source(plugin)} raised {type(error).__name__}: "
            f"{error}"
        ) from error


def _source(plugin: PluginSettings) -> str:
    return plugin.module or f"entry point {plugin.entry_point}"


def _kind(found: object) -> str:
    if isinstance(found, type):
        return f"the class {found.__qualname__}"
    return f"an object of type {type(found).__name__}"
