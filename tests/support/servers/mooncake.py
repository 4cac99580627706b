"""Mooncake Store: a master with its metadata service, and a process that lends it memory."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from support.servers.process import (
    ServerProcess,
    accepts,
    find_program,
    free_port,
    load_libraries,
)

#: What the store process runs: it joins the pool and waits for its end.
_STORE = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
metadata, master, size = sys.argv[1:]
code = store.setup("127.0.0.1", metadata, int(size), 16 << 20, "tcp", "", master)
if code:
    sys.exit(f"setup answered {code}")
print("kvkeep: joined", flush=True)
while True:
    time.sleep(3600)
"""
DEFAULT_SEGMENT_BYTES = 256 << 20
#: What Mooncake's Python module needs of the system, in this order.
_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libnuma.so.1", "libibverbs.so.1")


def load_mooncake_libraries() -> None:
    """Let this process import ``mooncake.store`` where its libraries were unpacked."""
    load_libraries(*_LIBRARIES)


@dataclass
class MooncakePool:
    """A running pool: one master, one process that lends memory."""

    port: int
    metadata_port: int
    metrics_port: int
    master: ServerProcess
    store: ServerProcess

    def url(self, port: int | None = None) -> str:
        """As kvkeep is told of it; ``port`` is that of a proxy in front of the master."""
        metadata = f"http%3A%2F%2F127.0.0.1%3A{self.metadata_port}%2Fmetadata"
        return (
            f"mooncake://127.0.0.1:{port or self.port}?metadata_server={metadata}"
            f"&admin=127.0.0.1:{self.metrics_port}"
        )

    def restart_master(self) -> None:
        """A new master on the old ports: it knows nothing of what the old one knew."""
        self.master.restart()
        self.wait_joined()

    def wait_joined(self) -> None:
        """Wait until the master counts the memory of the store process."""
        deadline = time.monotonic() + 60.0
        while not self._has_memory():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no memory in the pool; log of the master:\n{self.master.log}")
            time.sleep(0.05)

    def _has_memory(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5.0
            ) as answer:
                lines = answer.read().decode().splitlines()
        except (urllib.error.URLError, OSError):
            return False
        totals = [line for line in lines if line.startswith("master_total_capacity_bytes ")]
        return bool(totals) and float(totals[0].split()[1]) > 0


@contextmanager
def mooncake_pool(*, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> Iterator[MooncakePool]:
    """A pool with that much memory, ended with the block. This process can join it then."""
    load_mooncake_libraries()
    port, metadata_port, metrics_port = free_port(), free_port(), free_port()
    master = ServerProcess(
        "mooncake-master",
        [
            find_program("mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={port}",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={metadata_port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics_port}",
            "--client_ttl=5",
            "--logtostderr",
        ],
        lambda: accepts(port) and accepts(metadata_port),
    )
    with master:
        metadata = f"http://127.0.0.1:{metadata_port}/metadata"
        store = ServerProcess(
            "mooncake-store",
            [sys.executable, "-c", _STORE, metadata, f"127.0.0.1:{port}", str(segment_bytes)],
            lambda: "kvkeep: joined" in store.log,
        )
        with store:
            yield MooncakePool(port, metadata_port, metrics_port, master, store)
