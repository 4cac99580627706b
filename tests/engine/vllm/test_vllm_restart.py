"""Restarts of real vLLM on one directory (float32): in order, by ``kill -9``, with little memory.

Three engines, one after the other. The first stores and is shut down; the second finds it all,
stores more and is killed; the third has memory for three chunks. All answer as an engine without
kvkeep does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import cloudpickle
import pytest

from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.testing.chunks import wait_until
from support.disk import chunk_files

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CHUNK = 256
#: A chunk of this model: 256 tokens, 30 layers, K and V, 3 heads of 64 float32.
CHUNK_BYTES = 256 * 30 * 2 * 3 * 64 * 4
CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"


@pytest.fixture(autouse=True)
def _functions_travel():
    """The worker's process cannot import this module: its functions are sent whole."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def _hits(engine, tier: str) -> int:
    """Tokens that lookups found in a tier."""
    name = f'kvkeep_lookup_hit_tokens_total{{tier="{tier}"}}'
    return int(engine.report().metrics.get(name, 0))


def _same_tokens(engine, cases, reference) -> None:
    for case in cases:
        assert engine.generate([case])[0] == reference[case]


def _manager(worker):
    """kvkeep's CacheManager in the worker; runs there."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._manager


def _in_worker(engine, function, *args):
    """Run a function in the worker's process: ``function(manager, *args)``."""
    [result] = engine.llm.collective_rpc(lambda worker: function(_manager(worker), *args))
    return result


def _forget(manager, tokens: list[int], numbers: list[int], tier: str) -> list[tuple]:
    """Take chunks of a prompt out of one tier; returns where the prompt is then."""
    keys = manager.engine.token_database.process_tokens(tokens).keys
    manager.storage.batched_remove([keys[number] for number in numbers], [tier])
    runs = manager.storage.get_block_mapping(keys)
    return [(run.location, run.start, run.end) for run in runs]


def _slow_down(manager, tokens: list[int], number: int, seconds: float) -> None:
    """Let the next read of one chunk of a prompt take so long."""
    from kvkeep.backends.disk.files import FileIO

    keys = manager.engine.token_database.process_tokens(tokens).keys
    name, really_open = keys[number].hex(), FileIO.open_read

    def open_read(self, path):
        if os.path.basename(path).startswith(name):
            threading.Event().wait(seconds)
        return really_open(self, path)

    FileIO.open_read = open_read


def _pid_and_socket(worker) -> tuple[int, str]:
    """Runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return os.getpid(), str(get_kv_transfer_group()._worker._server.path)


def _kill(engine) -> None:
    """``kill -9``: the worker first, which would end in order if it saw the engine die."""
    core = engine.llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid
    [(worker, socket)] = engine.llm.collective_rpc(_pid_and_socket)
    os.kill(worker, signal.SIGKILL)
    os.kill(core, signal.SIGKILL)
    os.unlink(socket)  # as the next worker does with one that nobody answers at


def test_fault_37_and_39_restarts(running, reference, cases, tmp_path):
    """Faults 37 and 39: what was stored is found, whole, and nothing else is."""
    settings = {"disk.path": str(tmp_path), "cpu.size": "512MiB", "prefetch.timeout": "2s"}
    little = {"cpu.size": 3 * CHUNK_BYTES + 4096, "prefetch.memory": 3 * CHUNK_BYTES}
    shared = cases.concurrent[:3]
    stored = [*shared, cases.by_length[2 * CHUNK], cases.by_length[3 * CHUNK]]
    with running(settings) as engine:
        _same_tokens(engine, stored, reference)
        assert _hits(engine, DISK) == 0
        engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)
    assert len(chunk_files(tmp_path)) == 4 + 2 + 3
    more = [cases.growing[0], cases.growing[1], cases.by_length[CHUNK], cases.by_length[CHUNK + 1]]
    with running(settings) as engine:
        _find_after_restart(engine, stored, reference)
        _find_split(engine, shared[0], reference)
        _find_in_time(engine, stored[-1], reference)
        _same_tokens(engine, more, reference)
        _kill(engine)
    num_files = len(chunk_files(tmp_path))
    assert num_files >= 4 + 2 + 3
    with running(settings | little) as engine:
        assert not list((tmp_path / ROOT_NAME / "tmp").iterdir())
        _find_with_little_memory(engine, [*stored, *more], reference)
        assert len(chunk_files(tmp_path)) >= num_files


def _find_after_restart(engine, stored, reference) -> None:
    """Every chunk comes from the disk once, then from memory."""
    assert engine.generate([stored[0]])[0] == reference[stored[0]]
    assert (_hits(engine, DISK), _hits(engine, CPU)) == (4 * CHUNK, 0)
    _same_tokens(engine, stored[1:], reference)
    assert (_hits(engine, DISK), _hits(engine, CPU)) == (9 * CHUNK, 8 * CHUNK)
    assert engine.external_hits() == 17 * CHUNK - 2  # two prompts are whole chunks
    assert engine.generate(stored) == [reference[case] for case in stored]
    assert _hits(engine, DISK) == 9 * CHUNK
    engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)


def _find_split(engine, case, reference) -> None:
    """Spec 4.6: CPU and disk; CPU, disk and CPU again."""
    tokens = list(case.tokens)
    assert _in_worker(engine, _forget, tokens, [1, 2], CPU) == [(CPU, 0, 1), (DISK, 1, 4)]
    before = _hits(engine, DISK), _hits(engine, CPU)
    assert engine.generate([case])[0] == reference[case]
    assert _hits(engine, DISK) - before[0] == 3 * CHUNK
    assert _hits(engine, CPU) - before[1] == CHUNK
    _in_worker(engine, _forget, tokens, [3], DISK)
    runs = [(CPU, 0, 1), (DISK, 1, 3), (CPU, 3, 4)]
    assert _in_worker(engine, _forget, tokens, [1, 2], CPU) == runs
    before = _hits(engine, DISK), _hits(engine, CPU)
    assert engine.generate([case])[0] == reference[case]
    assert _hits(engine, DISK) - before[0] == 2 * CHUNK
    assert _hits(engine, CPU) - before[1] == 2 * CHUNK
    engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)


def _find_in_time(engine, case, reference) -> None:
    """Fault 42: of three chunks the second is read too slowly: one is found in time, and used."""
    tokens = list(case.tokens)
    _in_worker(engine, _forget, tokens, [0, 1, 2], CPU)
    _in_worker(engine, _slow_down, tokens, 1, 3.5)  # of 2 s
    before = _hits(engine, DISK), engine.external_hits()
    assert engine.generate([case])[0] == reference[case]
    assert _hits(engine, DISK) - before[0] == CHUNK
    assert engine.external_hits() - before[1] == CHUNK
    report = engine.report()
    assert report.open_leases == 0
    assert report.metrics['kvkeep_prefetches_total{outcome="deadline"}'] == 1
    wait_until(lambda: engine.report().used_bytes == engine.report().num_chunks * CHUNK_BYTES)


def _find_with_little_memory(engine, cases, reference) -> None:
    """Promoted and evicted, again and again; a prompt of four chunks is found as far as it fits."""
    for _ in range(2):
        for case in cases:
            assert engine.generate([case])[0] == reference[case]
            report = engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)
            assert report.num_chunks <= 3
    assert engine.counter("kvkeep_evictions_total") > 0
    assert _hits(engine, DISK) > 9 * CHUNK
    case = cases[4]
    assert engine.generate([case])[0] == reference[case]
    before = _hits(engine, CPU)
    assert engine.generate([case])[0] == reference[case]
    assert _hits(engine, CPU) - before == 3 * CHUNK, "promoted"
    engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)
