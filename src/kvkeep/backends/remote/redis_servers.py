"""RedisServers: where the servers behind a URL are, and connections to them, from redis-py.

Three kinds: one server, a master that sentinels watch, and a cluster. Callable from any thread.
Nothing is connected before it is needed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import (
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    _RESP2Parser,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvkeep.backends.remote.base import ConnectorOptions
from kvkeep.config.base import RemoteURL
from kvkeep.errors import ConfigError

_PORT, _SENTINEL_PORT = 6379, 26379
_TLS_OPTIONS = frozenset(
    {
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_password",
        "ssl_cert_reqs",
        "ssl_check_hostname",
    }
)
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})


class RedisServers(ABC):
    """Where values of a name are."""

    #: A server that is read-only now has lost its mastership, and another one has it.
    moves = False

    @abstractmethod
    def pools(self) -> list[ConnectionPool]:
        """One for each server that holds values. May ask the servers."""

    @abstractmethod
    def by_pool(self, names: Sequence[str]) -> Iterator[tuple[ConnectionPool, list[int]]]:
        """Which of these names (positions) are where. May ask the servers."""

    @abstractmethod
    def client(self) -> redis.Redis | RedisCluster:
        """The library's own client, for what is rare."""

    @abstractmethod
    def forget(self) -> None:
        """A server failed: close idle connections, which may be dead, too; look around anew."""

    @abstractmethod
    def close(self) -> None:
        """End all connections."""


class OneServer(RedisServers):
    """One server, or a master behind sentinels."""

    def __init__(self, pool: ConnectionPool, *, moves: bool = False) -> None:
        """Use the connections of ``pool``."""
        self._pool = pool
        self.moves = moves

    def pools(self) -> list[ConnectionPool]:
        """Its own."""
        return [self._pool]

    def by_pool(self, names: Sequence[str]) -> Iterator[tuple[ConnectionPool, list[int]]]:
        """All of them."""
        yield self._pool, list(range(len(names)))

    def client(self) -> redis.Redis:
        """Over the same connections."""
        return redis.Redis(connection_pool=self._pool)

    def forget(self) -> None:
        """Close idle connections."""
        self._pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """End all connections."""
        self._pool.disconnect()


class Cluster(RedisServers):
    """The masters of a cluster."""

    def __init__(self, nodes: Sequence[tuple[str, int]], settings: Mapping[str, Any]) -> None:
        """Ask one of ``nodes``, when it is time, where the others are."""
        self._nodes = list(nodes)
        self._settings = dict(settings)
        self._lock = threading.Lock()
        self._client: RedisCluster | None = None  # guarded by _lock
        self._is_stale = False  # guarded by _lock

    def client(self) -> RedisCluster:
        """The library's client, which knows which slot is where."""
        with self._lock:
            if self._client is None:
                nodes = [ClusterNode(host, port) for host, port in self._nodes]
                self._client = RedisCluster(
                    startup_nodes=nodes, require_full_coverage=False, **self._settings
                )
            elif self._is_stale:
                self._client.nodes_manager.initialize()
            self._is_stale = False
            return self._client

    def pools(self) -> list[ConnectionPool]:
        """One for each master."""
        client = self.client()
        return [self._pool_of(client, node) for node in client.get_primaries()]

    def by_pool(self, names: Sequence[str]) -> Iterator[tuple[ConnectionPool, list[int]]]:
        """Names by the master that has their slot."""
        client = self.client()
        places: dict[str, tuple[ClusterNode, list[int]]] = {}
        for index, name in enumerate(names):
            node = client.get_node_from_key(name)
            places.setdefault(node.name, (node, []))[1].append(index)
        for node, indexes in places.values():
            yield self._pool_of(client, node), indexes

    def forget(self) -> None:
        """Close idle connections, and ask for the slots again before the next call."""
        with self._lock:
            self._is_stale, client = True, self._client
        for node in client.get_nodes() if client is not None else ():
            if node.redis_connection is not None:
                node.redis_connection.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    @staticmethod
    def _pool_of(client: RedisCluster, node: ClusterNode) -> ConnectionPool:
        pool: ConnectionPool = client.get_redis_connection(node).connection_pool
        return pool


def open_servers(url: RemoteURL, options: ConnectorOptions) -> RedisServers:
    """The servers of a URL; see docs/remote.md for its forms.

    Raises:
        ConfigError: it has another form; the message shows no secret.
    """
    kind, _, mode = url.scheme.partition("-")
    is_tls = kind in ("rediss", "valkeys")
    allowed = frozenset({"client_name"})
    allowed |= _TLS_OPTIONS if is_tls else frozenset()
    allowed |= _SENTINEL_OPTIONS if mode == "sentinel" else frozenset()
    allowed |= {"db"} if kind == "unix" else frozenset()
    unknown = sorted(set(url.options) - allowed)
    if unknown:
        raise ConfigError(
            f"{url.scheme}:// has no option {unknown[0]}; it has " + ", ".join(sorted(allowed))
        )
    settings = _settings(url, options)
    if kind == "unix":
        settings |= {"path": url.path, "db": _db(url.options.get("db", "0"))}
        return OneServer(ConnectionPool(connection_class=UnixDomainSocketConnection, **settings))
    hosts = _hosts(url, _SENTINEL_PORT if mode == "sentinel" else _PORT)
    path = [part for part in url.path.split("/") if part]
    if mode == "cluster":
        if path:
            raise ConfigError("a cluster has no databases: the URL ends after the hosts")
        return Cluster(hosts, settings | ({"ssl": True} if is_tls else {}))
    if mode == "sentinel":
        return _watched(hosts, path, settings, is_tls=is_tls, url=url)
    if len(hosts) > 1 or len(path) > 1:
        raise ConfigError(f"write {url.scheme}://host:port/database")
    settings |= {"host": hosts[0][0], "port": hosts[0][1], "db": _db(path[0] if path else "0")}
    if is_tls:
        return OneServer(ConnectionPool(connection_class=SSLConnection, **settings))
    return OneServer(ConnectionPool(**settings))


def _watched(
    hosts: list[tuple[str, int]],
    path: list[str],
    settings: dict[str, Any],
    *,
    is_tls: bool,
    url: RemoteURL,
) -> OneServer:
    """The master that sentinels name."""
    if not 1 <= len(path) <= 2:
        raise ConfigError(f"write {url.scheme}://sentinel:port,.../service/database")
    shared = ("socket_timeout", "socket_connect_timeout", "protocol", "driver_info", "retry")
    sentinels = {name: settings[name] for name in shared}
    for name in _SENTINEL_OPTIONS & set(url.options):
        sentinels[name.removeprefix("sentinel_")] = url.options[name]
    if is_tls:
        tls = {name: value for name, value in settings.items() if name.startswith("ssl_")}
        sentinels |= tls | {"ssl": True}
        settings = settings | {"ssl": True}
    watch = Sentinel(hosts, sentinel_kwargs=sentinels)
    settings = settings | {"db": _db(path[1] if len(path) == 2 else "0")}
    pool: ConnectionPool = watch.master_for(path[0], **settings).connection_pool
    return OneServer(pool, moves=True)


def _settings(url: RemoteURL, options: ConnectorOptions) -> dict[str, Any]:
    """What every connection is told. The library itself never retries: RemoteBackend does."""
    settings: dict[str, Any] = {
        "socket_connect_timeout": options.connect_timeout_s,
        "socket_timeout": options.connect_timeout_s,  # of greetings; calls have their own deadline
        "protocol": 2,
        # Large values never reach the parser. This one, unlike that of hiredis, does not take a
        # session ticket of TLS for an answer that nobody asked for.
        "parser_class": _RESP2Parser,
        "driver_info": None,
        "retry": Retry(NoBackoff(), 0),
    }
    if url.scheme != "unix":
        settings["socket_keepalive"] = True
    if url.user is not None:
        settings["username"] = url.user
    if url.password is not None:
        settings["password"] = url.password
    for name, value in url.options.items():
        if name in _TLS_OPTIONS or name == "client_name":
            settings[name] = value
    if "ssl_check_hostname" in settings:
        settings["ssl_check_hostname"] = _flag(settings["ssl_check_hostname"])
    return settings


def _hosts(url: RemoteURL, port: int) -> list[tuple[str, int]]:
    """Host and port of each server in the URL."""
    found = []
    for text in url.hosts.split(","):
        head, _, tail = text.rpartition(":")
        if text.startswith("[") and text.endswith("]"):
            head, tail = text, ""
        host, digits = (head, tail) if head else (text, "")
        if not host or (digits and not digits.isdecimal()) or int(digits or port) > 65535:
            raise ConfigError(f"write {url.scheme}://host:port; hosts are {url.hosts!r}")
        found.append((host.strip("[]"), int(digits or port)))
    return found


def _db(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"a database of Redis is a number, not {text!r}")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"ssl_check_hostname is true or false, not {text!r}")
    return text.lower() == "true"
