"""What a URL of Mooncake Store means: ``mooncake://master:port?metadata_server=...``."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvkeep.backends.remote.base import ConnectorOptions
from kvkeep.config.base import RemoteURL, parse_size
from kvkeep.errors import ConfigError

DEFAULT_PORT = 50051
#: Where the master tells people and programs about itself.
DEFAULT_ADMIN_PORT = 9003
_PROTOCOLS = ("tcp", "rdma")
_OPTIONS = frozenset(
    {"metadata_server", "protocol", "devices", "local_hostname", "lend", "buffer", "admin"}
)
#: The client's own buffer, for values that are not read into the pool: least, and times a value.
_LEAST_BUFFER_BYTES, _BUFFER_VALUES = 16 << 20, 2


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """How to join a pool.

    Attributes:
        host: of the master.
        port: likewise.
        metadata_server: URL of the metadata service.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, with commas between; empty leaves the choice to the library.
        local_hostname: how the others reach this machine; None: its address towards the master.
        lend_bytes: memory that this process adds to the pool.
        buffer_bytes: the client's own buffer.
        admin: ``host:port`` of the master's HTTP service, for listing.
    """

    host: str
    port: int
    metadata_server: str
    protocol: str
    devices: str
    local_hostname: str | None
    lend_bytes: int
    buffer_bytes: int
    admin: str

    @classmethod
    def of(cls, url: RemoteURL, options: ConnectorOptions) -> MooncakeOptions:
        """Read a URL.

        Raises:
            ConfigError: an option is unknown, malformed or missing.
        """
        unknown = sorted(url.options.keys() - _OPTIONS)
        if unknown or url.user or url.password or url.path.strip("/"):
            what = f"the option {unknown[0]}" if unknown else "user, password or path"
            raise ConfigError(f"mooncake:// has no {what}; it has {', '.join(sorted(_OPTIONS))}")
        try:
            parts = urlsplit(f"//{url.hosts}")
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError:
            host = None
        if not host or "," in url.hosts:
            raise ConfigError("write the master as mooncake://host:port")
        given = dict(url.options)
        metadata_server = given.get("metadata_server", f"http://{host}:8080/metadata")
        protocol = given.get("protocol", "tcp")
        if protocol not in _PROTOCOLS:
            raise ConfigError(f"mooncake:// has no protocol {protocol}; it has tcp and rdma")
        buffer_bytes = max(
            _LEAST_BUFFER_BYTES, _BUFFER_VALUES * options.connections * options.max_value_bytes
        )
        return cls(
            host=host,
            port=port,
            metadata_server=metadata_server,
            protocol=protocol,
            devices=given.get("devices", ""),
            local_hostname=given.get("local_hostname"),
            lend_bytes=_size_of(given, "lend", 0),
            buffer_bytes=_size_of(given, "buffer", buffer_bytes),
            admin=given.get("admin", f"{host}:{DEFAULT_ADMIN_PORT}"),
        )

    @property
    def master(self) -> str:
        """As the library is told of it."""
        return f"{self.host}:{self.port}"

    def reach_master(self, timeout_s: float) -> str:
        """Make sure that a master runs there; the address of this machine on the way to it.

        It is asked for nothing: a server that runs ends a connection that its client has ended, and
        one that is frozen does not.

        Raises:
            OSError: it does not, within ``timeout_s``.
        """
        with socket.create_connection((self.host, self.port), timeout_s) as sock:
            address: str = sock.getsockname()[0]
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)
        return self.local_hostname or address


def _size_of(given: dict[str, str], name: str, otherwise: int) -> int:
    """A size with its unit."""
    if name not in given:
        return otherwise
    try:
        size = parse_size(given[name])
    except ValueError as error:
        raise ConfigError(f"{name} of mooncake://: {error}") from None
    if not isinstance(size, int):
        raise ConfigError(f"{name} of mooncake:// is no size")
    return size
