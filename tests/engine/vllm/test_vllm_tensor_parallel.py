"""Two ranks of real vLLM on the CPU, each with its own half of the heads, or with the same latents.

Tiny models with random weights, float32. One engine stores, loads from memory, disagrees and fails;
a second one finds it all on the disk.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import pytest

from kvkeep.config import load_settings
from kvkeep.lookup.client import LookupClient
from kvkeep.testing.chunks import wait_until
from support.tiny_models import VOCABULARY, make_latent, make_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CHUNK = 256
CPU, DISK, FIRST = "LocalCPUBackend", "LocalDiskBackend", "FirstRank"
#: Three full chunks and a tail, of different tokens.
PROMPTS = [
    [(step * index + start) % VOCABULARY for index in range(3 * CHUNK + 40)]
    for step, start in ((7, 3), (11, 5), (13, 1), (17, 2))
]


@pytest.fixture(autouse=True)
def _functions_travel(monkeypatch, engine_environment):
    """The workers cannot import this module; each gets a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def _manager(worker):
    """kvkeep's CacheManager in a worker; runs there."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._manager


def _forget(manager, rank: int, tokens: list[int], number: int, tiers: list[str]) -> None:
    """Lose one chunk of a prompt on one rank; runs on all."""
    if manager.engine.token_database.identity.rank == rank:
        keys = manager.engine.token_database.process_tokens(tokens).keys
        manager.storage.batched_remove([keys[number]], tiers)


def _fail_once(manager, is_passive: bool) -> None:
    """The next copy into the engine's pages fails on one rank, however often it is tried."""
    connector = manager.engine._connector
    here = manager.engine.is_passive == is_passive
    if not here or (not is_passive and manager.engine.token_database.identity.rank == 0):
        return

    def fails(*args, **more):
        raise RuntimeError("device lost")

    def last(*args, **more):
        del connector.batched_to_gpu, connector.to_gpu
        raise RuntimeError("device lost")

    connector.batched_to_gpu, connector.to_gpu = fails, last


def _lend_counters(manager) -> dict[str, float]:
    return manager.metrics.snapshot()


class Engine:
    """A running engine of two ranks."""

    def __init__(self, engine, client: LookupClient) -> None:
        self.engine = engine
        self.client = client

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        done = self.engine.llm.generate(asked, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    def in_workers(self, function, *args) -> list:
        return self.engine.llm.collective_rpc(lambda worker: function(_manager(worker), *args))

    def hits(self) -> float:
        return self.engine.external_hits()

    def counters(self) -> list[dict[str, float]]:
        return self.in_workers(_lend_counters)

    def pids(self) -> list[int]:
        return self.engine.llm.collective_rpc(lambda worker: os.getpid())

    def check_nothing_held(self) -> None:
        for report in self.client.check():
            assert report.open_leases == 0
            assert report.used_bytes + report.free_bytes == report.capacity_bytes


@contextmanager
def running_ranks(running_model, extra: dict, model) -> Iterator[Engine]:
    """An engine, and a client of both ranks' lookup servers."""
    from kvkeep.connectors.vllm.build import socket_paths

    arguments = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "skip_tokenizer_init": True,
        "transfer": {"kv_load_failure_policy": "recompute"},
    }
    with running_model(model, extra, **arguments) as engine:
        engine_id = engine.llm.llm_engine.vllm_config.kv_transfer_config.engine_id
        settings = load_settings(env=os.environ, extra=extra)
        paths = socket_paths(settings, os.environ, engine_id=engine_id, world_size=2)
        client = LookupClient(paths, timeout_s=2.0)
        try:
            yield Engine(engine, client)
        finally:
            client.close()


def _found_by_tier(counters: dict[str, float], tier: str) -> float:
    return counters.get(f'kvkeep_loaded_tokens_total{{tier="{tier}"}}', 0)


def test_two_ranks_with_kv_of_their_own(running_model, tmp_path) -> None:
    """Cold, from memory, of ranks that disagree, after a load that failed on one; from disk."""
    model = make_llama(tmp_path / "llama")
    extra = {
        "disk.path": str(tmp_path / "disk"),
        "cpu.size": "64MiB",
        "lookup.timeout": "4s",
        "cost.enabled": False,  # a tiny model computes faster than any disk
    }
    with running_ranks(running_model, extra, model) as ranks:
        cold = ranks.generate(PROMPTS)
        assert ranks.hits() == 0
        assert ranks.generate(PROMPTS) == cold
        assert ranks.hits() == len(PROMPTS) * 3 * CHUNK, "from memory"
        assert all(
            _found_by_tier(rank, CPU) == len(PROMPTS) * 3 * CHUNK for rank in ranks.counters()
        )
        _disagree(ranks, cold)
        _fail_on_one_rank(ranks, cold, is_passive=False)
        _stop_one_rank(ranks)
        ranks.check_nothing_held()
    with running_ranks(running_model, extra, model) as ranks:
        assert ranks.generate(PROMPTS) == cold
        assert ranks.hits() == len(PROMPTS) * 3 * CHUNK, "from disk"
        found = f'kvkeep_lookup_hit_tokens_total{{tier="{DISK}"}}'
        assert [rank[found] for rank in ranks.counters()] == [len(PROMPTS) * 3 * CHUNK] * 2
        ranks.check_nothing_held()


def _disagree(ranks: Engine, cold: list[list[int]]) -> None:
    """The lookup is the minimum over ranks, never a mixture; what was lost is stored again."""
    for rank, number in ((1, 1), (0, 2), (1, 0)):
        ranks.in_workers(_forget, rank, PROMPTS[0], number, [CPU, DISK])
        before = ranks.hits()
        assert ranks.generate(PROMPTS[:1]) == cold[:1]
        assert ranks.hits() - before == number * CHUNK
    before = ranks.hits()
    assert ranks.generate(PROMPTS[:1]) == cold[:1]
    assert ranks.hits() - before == 3 * CHUNK


def _fail_on_one_rank(ranks: Engine, cold: list[list[int]], *, is_passive: bool) -> None:
    """Fault 36: one rank cannot load; on no rank is anything kept that was computed without it."""
    before = [rank.get("kvkeep_stored_tokens_total", 0) for rank in ranks.counters()]
    longer = [*PROMPTS[1], *PROMPTS[0][: 2 * CHUNK]]  # the failing step completes a chunk as well
    ranks.in_workers(_fail_once, is_passive)
    assert ranks.generate([PROMPTS[1]]) == cold[1:2]
    ranks.in_workers(_fail_once, is_passive)
    first = ranks.generate([longer])
    lost = 'kvkeep_load_failed_tokens_total{cause="ranks"}'
    counters = ranks.counters()
    assert counters[0][lost] >= 2 * 3 * CHUNK, "rank 0 had them, and did not use them"
    after = [rank.get("kvkeep_stored_tokens_total", 0) for rank in counters]
    assert after == before, "nothing is stored on top of KV that was not there"
    assert ranks.generate([longer]) == first, "now with what is stored"
    assert ranks.generate([longer]) == first, "and with all of it"
    ranks.check_nothing_held()


def _stop_one_rank(ranks: Engine) -> None:
    """A stopped rank: lookups are misses by the deadline, and hits again when it goes on."""
    pid = ranks.pids()[1]
    assert ranks.client.lookup("before", PROMPTS[0], pin=False) == 3 * CHUNK
    os.kill(pid, signal.SIGSTOP)
    try:
        stat = Path(f"/proc/{pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        started = time.monotonic()
        assert [ranks.client.lookup(f"r{number}", PROMPTS[0]) for number in range(50)] == [0] * 50
        assert time.monotonic() - started < 2.0 + 10, "one deadline for all of them"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: ranks.client.lookup("after", PROMPTS[0], pin=False) == 3 * CHUNK)
    wait_until(lambda: all(report.open_leases == 0 for report in ranks.client.check()))


def test_two_ranks_with_the_same_latents(running_model, tmp_path) -> None:
    """Rank 0 stores and loads; the other copies what it loaded, and stores nothing."""
    model = make_latent(tmp_path / "latent")
    extra = {
        "disk.path": str(tmp_path / "disk"),
        "cpu.size": "32MiB",
        "cpu.first_rank_size": "48MiB",
        "lookup.timeout": "4s",
        "cost.enabled": False,
    }
    with running_ranks(running_model, extra, model) as ranks:
        first, second = ranks.client.check()
        assert 48 << 20 < first.capacity_bytes <= (48 + 16) << 20, "with room for byte buffers"
        assert second.capacity_bytes < 2 << 20, "one chunk: nothing is stored there"
        cold = ranks.generate(PROMPTS)
        assert ranks.hits() == 0
        assert ranks.generate(PROMPTS) == cold
        assert ranks.hits() == len(PROMPTS) * 3 * CHUNK
        first, second = ranks.counters()
        assert _found_by_tier(first, CPU) == len(PROMPTS) * 3 * CHUNK
        assert _found_by_tier(second, FIRST) == len(PROMPTS) * 3 * CHUNK
        assert second.get("kvkeep_stored_tokens_total", 0) == 0
        assert [report.num_chunks for report in ranks.client.check()] == [len(PROMPTS) * 3, 0]
        for number in range(3):
            ranks.in_workers(_forget, 0, PROMPTS[0], number, [CPU])
        assert ranks.generate(PROMPTS[:1]) == cold[:1], "rank 0 reads its disk"
        assert ranks.hits() == (len(PROMPTS) + 1) * 3 * CHUNK
        _fail_on_one_rank(ranks, cold, is_passive=True)
        ranks.check_nothing_held()
