"""Redis servers: a single one, a cluster of three, a master with replica and sentinel."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.servers.certificates import Certificates
from support.servers.process import (
    START_TIMEOUT_S,
    ServerError,
    ServerProcess,
    find_program,
    free_port,
    library_environment,
)

#: The port of a cluster's own messages lies this far above that of its clients.
CLUSTER_PORT_ABOVE = 10000
#: What the sentinel calls the master.
MASTER_NAME = "kvkeep"


@dataclass(frozen=True)
class RedisOptions:
    """How a server is started.

    Attributes:
        password: What a client must say; empty asks for nothing.
        max_memory_bytes: The server's ``maxmemory``; 0 is no limit.
        eviction: Its ``maxmemory-policy``.
        persistent: Every write is on disk before it is answered, so that a restart finds it.
        certificates: TLS, and nothing but TLS, on the port.
        arguments: Further ones of ``redis-server``.
    """

    password: str = ""
    max_memory_bytes: int = 0
    eviction: str = "allkeys-lru"
    persistent: bool = False
    certificates: Certificates | None = None
    arguments: Sequence[str] = ()


@dataclass
class RedisServer:
    """A running server; its process is in ``process``."""

    port: int
    options: RedisOptions
    process: ServerProcess = field(init=False)

    @property
    def unix_socket(self) -> Path:
        """It listens here too."""
        return self.process.home / "s"

    @property
    def url(self) -> str:
        """As a client is told of it, over TCP."""
        scheme = "rediss" if self.options.certificates else "redis"
        secret = f":{self.options.password}@" if self.options.password else ""
        return f"{scheme}://{secret}127.0.0.1:{self.port}"

    def command(self, *words: str | int) -> bytes:
        """Send one command over the Unix socket and return the first part of its answer, raw.

        Raises:
            OSError: it does not listen, or does not answer within five seconds.
        """
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5.0)
            sock.connect(str(self.unix_socket))
            return _exchange(sock, self.options.password, [str(word) for word in words])

    def answers(self) -> bool:
        """It listens, on TCP and on its Unix socket, and has read its data."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5.0) as sock:
                if self.options.certificates is not None:
                    context = self.options.certificates.client_context()
                    with context.wrap_socket(sock, server_hostname="localhost") as wrapped:
                        reply = _exchange(wrapped, self.options.password, ["PING"])
                else:
                    reply = _exchange(sock, self.options.password, ["PING"])
            return reply.startswith(b"+PONG") and self.command("PING").startswith(b"+PONG")
        except (OSError, ssl.SSLError):
            return False


def _exchange(sock: socket.socket, password: str, words: list[str]) -> bytes:
    """Send one command as RESP, after the password if there is one."""
    if password:
        sock.sendall(_encoded(["AUTH", password]))
        sock.recv(4096)
    sock.sendall(_encoded(words))
    return sock.recv(65536)


def _encoded(words: list[str]) -> bytes:
    parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
    return f"*{len(words)}\r\n{''.join(parts)}".encode()


def _arguments(server: RedisServer) -> list[str]:
    """The command line of ``redis-server``."""
    options, port = server.options, server.port
    wanted: dict[str, object] = {
        "bind": "127.0.0.1",
        "port": 0 if options.certificates else port,
        "unixsocket": "s",
        "save": "",
        "dir": ".",
        "maxmemory": options.max_memory_bytes,
        "maxmemory-policy": options.eviction,
    }
    if options.password:
        wanted |= {"requirepass": options.password, "masterauth": options.password}
    if options.persistent:
        wanted |= {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "yes"}
    if options.certificates:
        wanted |= {
            "tls-port": port,
            "tls-cert-file": options.certificates.cert,
            "tls-key-file": options.certificates.key,
            "tls-ca-cert-file": options.certificates.authority,
            "tls-auth-clients": "no",
        }
    pairs = [part for name, value in wanted.items() for part in (f"--{name}", str(value))]
    return [*pairs, *options.arguments]


@contextmanager
def redis_server(options: RedisOptions | None = None) -> Iterator[RedisServer]:
    """A single server, ended with the block."""
    server = RedisServer(free_port(), options or RedisOptions())
    command = [find_program("redis-server"), *_arguments(server)]
    server.process = ServerProcess("redis", command, server.answers)
    with server.process:
        yield server


@contextmanager
def redis_cluster(size: int = 3) -> Iterator[list[RedisServer]]:
    """A cluster of masters without replicas, all slots served."""
    with ExitStack() as stack:
        servers = []
        for _ in range(size):
            port = free_port(also_above=CLUSTER_PORT_ABOVE)
            arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
            server = RedisServer(port, RedisOptions(arguments=arguments))
            command = [find_program("redis-server"), *_arguments(server)]
            server.process = ServerProcess("redis-cluster", command, server.answers)
            stack.enter_context(server.process)
            servers.append(server)
        program = find_program("redis-cli")
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        subprocess.run(
            [program, "--cluster", "create", *addresses, "--cluster-yes"],
            check=True,
            capture_output=True,
            timeout=START_TIMEOUT_S,
            env={**os.environ, **library_environment()},
        )
        _wait_for(servers, "cluster_state:ok", "CLUSTER", "INFO")
        yield servers


@dataclass(frozen=True)
class Watched:
    """A master, its replica and the sentinel that watches them."""

    master: RedisServer
    replica: RedisServer
    sentinel_port: int
    sentinel: ServerProcess

    @property
    def url(self) -> str:
        """As a client is told of it."""
        return f"redis-sentinel://127.0.0.1:{self.sentinel_port}/{MASTER_NAME}"


@contextmanager
def redis_sentinel() -> Iterator[Watched]:
    """A master, a replica in step with it and a sentinel that fails over after half a second."""
    with redis_server() as master:
        follow = RedisOptions(arguments=["--replicaof", "127.0.0.1", str(master.port)])
        with redis_server(follow) as replica:
            _wait_for([replica], "master_link_status:up", "INFO", "replication")
            port = free_port()
            sentinel = ServerProcess(
                "redis-sentinel",
                [find_program("redis-server"), "sentinel.conf", "--sentinel"],
                lambda: _sentinel_ready(port),
            )
            (sentinel.home / "sentinel.conf").write_text(
                f"bind 127.0.0.1\nport {port}\ndir .\n"
                f"sentinel monitor {MASTER_NAME} 127.0.0.1 {master.port} 1\n"
                f"sentinel down-after-milliseconds {MASTER_NAME} 500\n"
                f"sentinel failover-timeout {MASTER_NAME} 2000\n",
                encoding="utf-8",
            )
            with sentinel:
                yield Watched(master, replica, port, sentinel)


def _sentinel_ready(port: int) -> bool:
    """The sentinel answers and has found the replica."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
            return b"slaves=1" in _exchange(sock, "", ["INFO", "sentinel"])
    except OSError:
        return False


def _wait_for(servers: Sequence[RedisServer], text: str, *command: str) -> None:
    """Wait until every server's answer to a command contains a text."""
    deadline = time.monotonic() + START_TIMEOUT_S
    for server in servers:
        while text.encode() not in (answer := server.command(*command)):
            if time.monotonic() > deadline:
                raise ServerError(f"{server.url}: no {text!r} in {answer.decode()!r}")
            time.sleep(0.05)
