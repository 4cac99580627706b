"""Parts of the remote tier (:mod:`kvkeep.backends.remote.backend`).

Start at ``base.py``: what a connector to a store promises. ``names.py`` finds one by its URL.

Which connector a URL's scheme means. A connector's module is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable

from kvkeep.backends.remote.base import ConnectorOptions, RemoteConnector
from kvkeep.config.base import RemoteURL
from kvkeep.errors import ConfigError, MissingExtraError

MakeConnector = Callable[[RemoteURL, ConnectorOptions], RemoteConnector]


def _directory(url: RemoteURL, options: ConnectorOptions) -> RemoteConnector:
    from kvkeep.backends.remote.directory import DirectoryConnector

    return DirectoryConnector(url, options)


def _redis(url: RemoteURL, options: ConnectorOptions) -> RemoteConnector:
    try:
        from kvkeep.backends.remote.redis_connector import RedisConnector
    except ImportError as error:
        raise MissingExtraError(f"{url.scheme}://", "redis") from error
    return RedisConnector(url, options)


def _object_store(url: RemoteURL, options: ConnectorOptions) -> RemoteConnector:
    try:
        from kvkeep.backends.remote.object_store import ObjectStoreConnector
    except ImportError as error:
        raise MissingExtraError(f"{url.scheme}://", "s3") from error
    return ObjectStoreConnector(url, options)


def _mooncake(url: RemoteURL, options: ConnectorOptions) -> RemoteConnector:
    try:
        from kvkeep.backends.remote.mooncake import MooncakeConnector
    except ModuleNotFoundError as error:
        raise MissingExtraError("mooncake://", "mooncake") from error
    except ImportError as error:  # such as libibverbs.so.1, which is no Python package
        raise ConfigError(f"mooncake:// lacks a library of the system: {error}") from error
    return MooncakeConnector(url, options)


_OBJECT_STORES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "http", "https")
_REDIS_SCHEMES = [
    "unix",
    *(
        kind + mode
        for kind in ("redis", "rediss", "valkey", "valkeys")
        for mode in ("", "-cluster", "-sentinel")
    ),
]

#: By scheme.
CONNECTORS: dict[str, MakeConnector] = {
    "file": _directory,
    **dict.fromkeys(_REDIS_SCHEMES, _redis),
    **dict.fromkeys(_OBJECT_STORES, _object_store),
    "mooncake": _mooncake,
}


def create_connector(url: RemoteURL, options: ConnectorOptions) -> RemoteConnector:
    """The connector to a store. Nothing is asked of the store yet: it may be down now.

    Raises:
        ConfigError: the scheme is unknown, or the URL or an option is wrong for it.
        MissingExtraError: the client library is not installed.
    """
    make = CONNECTORS.get(url.scheme)
    if make is None:
        known = ", ".join(sorted(CONNECTORS))
        raise ConfigError(f"there is no remote store of the kind {url.scheme}://; known: {known}")
    return make(url, options)
