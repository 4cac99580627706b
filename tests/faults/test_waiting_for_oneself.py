"""A thread that has work to do for others never waits for that work itself."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.server import LookupServer
from support.engine_rig import EngineRig

#: Far more than is needed; whoever waits for itself waits all of it.
LONG_S = 60.0


def test_the_lookup_thread_frees_the_memory_that_a_load_waits_for():
    """Fault 27: a load waits for memory on the engine's thread, never on the lookup server's.

    Leases fill the pool, so the load can only go on when an unpin is handled. That happens on the
    server's thread, which meanwhile also answers lookups: it never waits for memory itself.
    """
    rig = EngineRig(pool_chunks=2, alloc_timeout_s=LONG_S)
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as folder, rig:
        identity = rig.engine.token_database.identity
        path = Path(folder) / "private" / "0.sock"
        server = LookupServer(rig.engine, path, identity=identity, metrics=rig.metrics)
        client = LookupClient([path], timeout_s=LONG_S)
        try:
            tokens = list(range(16))
            rig.fill(tokens)
            assert client.lookup("one", tokens, pin=True) == 16
            shape, dtype, fmt = rig.connector.chunk_shape(8)
            assert rig.cpu.batched_allocate(shape, dtype, 1, fmt, busy_loop=False) is None

            loaded: list[object] = []
            load = threading.Thread(
                target=lambda: loaded.extend(
                    rig.cpu.batched_allocate(shape, dtype, 2, fmt, busy_loop=True) or []
                )
            )
            load.start()
            load.join(0.2)
            assert load.is_alive(), "all memory is leased, and the load did not wait"
            assert client.lookup("two", tokens, pin=True) == 16
            client.unpin(["two"])
            assert load.is_alive(), "memory under a lease was taken"
            client.unpin(["one"])
            load.join(LONG_S / 2)
            assert not load.is_alive(), "the thread that frees the memory was waiting for it"
            assert len(loaded) == 2
            for obj in loaded:
                obj.ref_count_down()
            assert client.lookup("three", tokens, pin=True) == 0
        finally:
            client.close()
            server.close()
