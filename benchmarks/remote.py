"""How fast is the remote tier, against the client library used plainly? (issue of the tier, 90%).

    python benchmarks/remote.py --stores redis unix s3 mooncake file --total-mib 128

For each store a real server is started on this machine. The same values (header and payload of a
chunk) are put and read back through RemoteBackend, checksums and all, and by as many threads that
do nothing but call the client library. Rounds alternate; the median of the ratios of the rounds
counts. Prints one row per store.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.backend import RemoteBackend, RemoteOptions
from kvkeep.backends.remote.base import HEADER_BYTES, ConnectorOptions
from kvkeep.codec.frame import ChunkMeta
from kvkeep.codec.names import codec_of
from kvkeep.config.base import RemoteURL
from kvkeep.layout import GroupLayout, MemoryFormat
from kvkeep.memory.base import MemoryObj, References
from kvkeep.memory.factory import initialize_allocator, tensor_pool
from kvkeep.metrics import Metrics
from kvkeep.policy.classic import LRUPolicy
from kvkeep.testing.chunks import make_key
from support.disk import IDENTITY
from support.servers.mooncake import MooncakePool, mooncake_pool
from support.servers.redis import RedisServer, redis_server
from support.servers.s3 import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, S3Server, s3_server

#: Values of one call of Mooncake's batch functions, as RemoteBackend has them.
PUT_GROUP, GET_GROUP = 4, 8
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Plain:
    """The client library and nothing else; both are called in many threads, once per value."""

    put: Callable[[Sequence[str], Sequence[np.ndarray]], object]
    get: Callable[[Sequence[str], Sequence[np.ndarray]], object]
    put_group: int = 1
    get_group: int = 1


def plain_redis(arguments: dict[str, object]) -> Plain:
    """redis-py, ``SET`` and ``GET``."""
    import redis

    client = redis.Redis(**arguments)
    return Plain(
        put=lambda names, values: client.set(names[0], values[0].data),
        get=lambda names, outs: client.get(names[0]),
    )


def plain_s3(server: S3Server) -> Plain:
    """obstore, one request per object, without multipart and without signing the payload."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        region=REGION,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        unsigned_payload=True,
        client_options={"allow_http": True},
    )
    return Plain(
        put=lambda names, values: obstore.put(store, names[0], values[0], use_multipart=False),
        get=lambda names, outs: obstore.get(store, names[0]).bytes(),
    )


def plain_mooncake(pool: MooncakePool, memory: np.ndarray) -> tuple[Plain, Any]:
    """The batch calls, from and into registered memory; and the client."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    metadata = f"http://127.0.0.1:{pool.metadata_port}/metadata"
    master = f"127.0.0.1:{pool.port}"
    assert client.setup("127.0.0.1", metadata, 0, 64 << 20, "tcp", "", master) == 0
    assert client.register_buffer(memory.ctypes.data, memory.nbytes) == 0

    def put(names: Sequence[str], values: Sequence[np.ndarray]) -> None:
        sizes = [value.nbytes for value in values]
        codes = client.batch_put_from(list(names), [v.ctypes.data for v in values], sizes)
        assert set(codes) == {0}, codes

    def get(names: Sequence[str], outs: Sequence[np.ndarray]) -> None:
        sizes = [out.nbytes for out in outs]
        codes = client.batch_get_into(list(names), [o.ctypes.data for o in outs], sizes)
        assert codes == sizes, codes

    return Plain(put, get, PUT_GROUP, GET_GROUP), client


def plain_files(folder: Path) -> Plain:
    """One ``write`` and one ``readinto`` per file."""

    def put(names: Sequence[str], values: Sequence[np.ndarray]) -> None:
        with open(folder / names[0], "wb", buffering=0) as file:
            file.write(values[0].data)

    def get(names: Sequence[str], outs: Sequence[np.ndarray]) -> None:
        with open(folder / names[0], "rb", buffering=0) as file:
            assert file.readinto(outs[0].data) == outs[0].nbytes

    return Plain(put, get)


@contextmanager
def store(kind: str, memory: np.ndarray) -> Iterator[tuple[str, Plain, Callable[[], object]]]:
    """A store: its URL for kvkeep, the plain client, and what empties it."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kvkeep-bench-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if kind in ("redis", "unix"):
            server: RedisServer = stack.enter_context(redis_server())
            path = str(server.unix_socket)
            arguments: dict[str, object] = {"port": server.port}
            if kind == "unix":
                arguments = {"unix_socket_path": path}
            url = server.url if kind == "redis" else f"unix://{path}"
            yield url, plain_redis(arguments), lambda: server.command("FLUSHALL")
        elif kind == "s3":
            s3 = stack.enter_context(s3_server(data=folder))
            yield s3.url(), plain_s3(s3), lambda: [path.unlink() for path in s3.objects()]
        elif kind == "mooncake":
            pool = stack.enter_context(mooncake_pool(segment_bytes=2 * memory.nbytes))
            plain, client = plain_mooncake(pool, memory)
            stack.callback(client.close)
            yield pool.url(), plain, lambda: client.remove_all(True)
        else:
            (folder / "plain").mkdir()
            (folder / "tier").mkdir()
            plain = plain_files(folder / "plain")
            yield f"file://{folder / 'tier'}", plain, lambda: _remove_files(folder)


def _remove_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()


class Bench:
    """One chunk size: a pool with chunks, and memory for values of the plain client."""

    def __init__(self, chunk_bytes: int, count: int, threads: int) -> None:
        self.chunk_bytes, self.count, self.threads = chunk_bytes, count, threads
        self.shape = (1, 1, chunk_bytes)
        group = GroupLayout("full", 1, chunk_bytes)
        self.identity = replace(IDENTITY, layout=replace(IDENTITY.layout, groups=(group,)))
        allocator = initialize_allocator(2 * count * chunk_bytes, chunk_bytes=chunk_bytes)
        self.pool = LocalCPUBackend(allocator, LRUPolicy(), metrics=Metrics())
        self.objs = self._allocate()
        self.values = np.empty((count, HEADER_BYTES + chunk_bytes), np.uint8)
        self.outs = np.zeros_like(self.values)
        self.memory = np.empty(0)
        chance = np.random.default_rng(1)
        for obj, value in zip(self.objs, self.values, strict=True):
            value[:] = chance.integers(0, 256, len(value), dtype=np.uint8)
            obj.array[:] = value[HEADER_BYTES:]
        References(self._allocate()).release()  # commits the memory that is read into
        self.executor = ThreadPoolExecutor(threads)

    def _allocate(self) -> list[MemoryObj]:
        objs = self.pool.batched_allocate(
            self.shape, torch.uint8, self.count, MemoryFormat.OPAQUE_PAGES
        )
        assert objs is not None
        return objs

    def open(self, url: str) -> RemoteBackend:
        """The tier over a store."""
        connector = create_connector(
            RemoteURL.parse(url),
            ConnectorOptions(
                connections=self.threads, max_value_bytes=HEADER_BYTES + self.chunk_bytes
            ),
        )
        connector.register(tensor_pool(self.pool.allocator).arena.array.data)
        meta = ChunkMeta(MemoryFormat.OPAQUE_PAGES, "uint8", self.shape)
        return RemoteBackend(
            connector,
            RemoteOptions(
                threads=self.threads,
                queue_bytes=1 << 40,
                load_timeout_s=TIMEOUT_S,
                store_timeout_s=TIMEOUT_S,
                lookup_timeout_s=TIMEOUT_S,
            ),
            identity=self.identity,
            full_chunk=meta,
            codec=codec_of("raw"),
            allocator_backend=self.pool,
            metrics=Metrics(),
        )

    def _rate(self, started: float) -> float:
        """GB/s since ``started`` for all chunks."""
        return self.count * self.chunk_bytes / (time.perf_counter() - started) / 1e9

    def plain(self, client: Plain, prefix: str) -> tuple[float, float]:
        """GB/s put and read with the client library."""
        names = [f"{prefix}-{number}" for number in range(self.count)]
        outs = self.outs

        def groups(size: int) -> list[slice]:
            return [slice(start, start + size) for start in range(0, self.count, size)]

        started = time.perf_counter()
        puts = groups(client.put_group)
        list(self.executor.map(lambda part: client.put(names[part], self.values[part]), puts))
        put = self._rate(started)
        started = time.perf_counter()
        gets = groups(client.get_group)
        list(self.executor.map(lambda part: client.get(names[part], outs[part]), gets))
        return put, self._rate(started)

    def tier(self, remote: RemoteBackend, prefix: str) -> tuple[float, float]:
        """GB/s put and read with the tier."""
        keys = [make_key((prefix, number)) for number in range(self.count)]
        started = time.perf_counter()
        remote.batched_submit_put_task(keys, self.objs)
        assert remote.flush(TIMEOUT_S)
        put = self._rate(started)
        started = time.perf_counter()
        found = remote.batched_get_blocking(keys)
        got = self._rate(started)
        with References(found):
            assert all(
                obj is not None and obj.array[0] == mine.array[0]
                for obj, mine in zip(found, self.objs, strict=True)
            )
        return put, got

    def run(self, kind: str, rounds: int) -> list[tuple[float, ...]]:
        """Rates of each round: plain put and get, tier put and get."""
        both = np.concatenate([self.values.reshape(-1), self.outs.reshape(-1)])
        self.values, self.outs = (
            both[: self.values.size].reshape(self.values.shape),
            both[self.values.size :].reshape(self.outs.shape),
        )
        measured = []
        with store(kind, both) as (url, client, empty):
            remote = self.open(url)
            for number in range(-1, rounds):  # the first one warms up
                prefix = f"{os.getpid()}-{number}"
                if number % 2:
                    plain = self.plain(client, prefix)
                    tier = self.tier(remote, prefix)
                else:
                    tier = self.tier(remote, prefix)
                    plain = self.plain(client, prefix)
                empty()
                if number >= 0:
                    measured.append((*plain, *tier))
            remote.close()
        return measured

    def close(self) -> None:
        """Give everything back."""
        References(self.objs).release()
        self.pool.close()
        self.executor.shutdown()


def main() -> None:
    """Print one row per store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stores", nargs="+", default=["redis", "unix", "s3", "mooncake", "file"])
    parser.add_argument("--chunk-mib", type=float, default=4)
    parser.add_argument("--total-mib", type=int, default=128)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    chunk_bytes = int(args.chunk_mib * (1 << 20))
    print("| store | plain put | tier put | ratio | plain get | tier get | ratio |")
    print("|---|---|---|---|---|---|---|")
    for kind in args.stores:
        bench = Bench(chunk_bytes, (args.total_mib << 20) // chunk_bytes, args.threads)
        try:
            rounds = bench.run(kind, args.rounds)
        finally:
            bench.close()
        plain_put, plain_get, tier_put, tier_get = map(statistics.median, zip(*rounds, strict=True))
        put = statistics.median(one[2] / one[0] for one in rounds)
        get = statistics.median(one[3] / one[1] for one in rounds)
        print(
            f"| {kind} | {plain_put:.2f} GB/s | {tier_put:.2f} | {put:.0%} "
            f"| {plain_get:.2f} GB/s | {tier_get:.2f} | {get:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
