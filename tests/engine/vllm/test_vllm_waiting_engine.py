"""Real vLLM over a slow tier (float32): one request waits for its chunks, and no other one does."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace

import cloudpickle
import pytest

from kvkeep.testing.chunks import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CHUNK, SHARED = 256, 1024
#: A chunk of this model: 256 tokens, 30 layers, K and V, 3 heads of 64 float32.
CHUNK_BYTES = 256 * 30 * 2 * 3 * 64 * 4
CPU, SLOW = "LocalCPUBackend", "SlowBackend"
SETTINGS = {
    "plugins": [{"name": SLOW, "module": "kvkeep.testing.slow:SlowBackend"}],
    "cost.enabled": False,
    "cpu.size": 24 * CHUNK_BYTES,
}


@pytest.fixture(autouse=True)
def _functions_travel():
    """The worker's process cannot import this module: its functions are sent whole."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=[False, True], ids=["before-steps", "between-steps"])
def engine(request, start_engine):
    """An engine with a slow tier; loads from memory into pages run before steps or between."""
    return start_engine(SETTINGS | {"load.asynchronous": request.param})


def _storage(worker):
    """kvkeep's StorageManager in the worker; runs there."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._manager.storage


def _in_worker(engine, function, *args):
    """Run ``function(storage, *args)`` in the worker's process."""
    [result] = engine.llm.collective_rpc(lambda worker: function(_storage(worker), *args))
    return result


def _open_gate(storage, is_open: bool, seconds_per_chunk: float = 0.0) -> int:
    """Let reads of the slow tier through, or not; how many there were so far."""
    slow = storage.storage_backends["SlowBackend"]
    slow.seconds_per_chunk = seconds_per_chunk
    (slow.gate.set if is_open else slow.gate.clear)()
    return len(slow.reads)


def _held(storage) -> dict[str, int]:
    """What prefetches hold."""
    prefetcher = storage.prefetcher
    return {
        "lookups": prefetcher.num_lookups,
        "chunks": prefetcher.num_chunks_held,
        "events": len(prefetcher.events),
        "leases": len(storage.leases),
    }


def check_idle(engine) -> None:
    """No lease, no event, no task, no room, no memory is left."""
    wait_until(lambda: not any(_in_worker(engine, _held).values()))
    wait_until(lambda: engine.report().used_bytes == engine.report().num_chunks * CHUNK_BYTES)
    report = engine.report()
    assert report.open_leases == 0
    assert report.used_bytes + report.free_bytes == report.capacity_bytes
    assert engine.counter("kvkeep_load_failed_tokens_total") == 0


def forget_memory(engine) -> None:
    """Leave chunks in the slow tier alone."""
    engine.client.clear([CPU])


def run(core, names: dict[str, object], done: dict[str, list[int]], *, until: str) -> list[str]:
    """Step until a request is finished; the requests of every output, in order."""
    order: list[str] = []
    while until not in done:
        for output in core.step():
            order.append(output.request_id)
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    assert done.keys() <= names.keys()
    return order


def test_a_running_request_does_not_wait_for_another_ones_chunks(engine, cases, reference):
    """Issue 4, point 3, by events: all of one request's steps happen while another one waits."""
    slow, quick = cases.concurrent[0], cases.growing[0]
    assert engine.generate([slow])[0] == reference[slow]
    forget_memory(engine)
    _in_worker(engine, _open_gate, False)
    core = engine.llm.llm_engine
    names = {"slow": slow, "quick": quick}
    done: dict[str, list[int]] = {}
    for name, case in names.items():
        core.add_request(name, {"prompt_token_ids": list(case.tokens)}, case.params())
    order = run(core, names, done, until="quick")
    assert set(order) == {"quick"}
    assert len(done["quick"]) == quick.max_tokens
    reads = _in_worker(engine, _open_gate, True)
    assert reads > 0, "its chunks were asked for meanwhile"
    hits = engine.external_hits()
    run(core, names, done, until="slow")
    assert done == {name: reference[case][0] for name, case in names.items()}
    assert engine.external_hits() - hits == SHARED
    check_idle(engine)


def test_eight_at_once_from_the_slow_tier(engine, cases, reference):
    """They share four chunks, which are read once."""
    expected = [reference[case] for case in cases.concurrent]
    assert engine.generate(cases.concurrent) == expected
    forget_memory(engine)
    before = _in_worker(engine, _open_gate, True, 0.05)
    hits = engine.external_hits()
    assert engine.generate(cases.concurrent) == expected
    assert engine.external_hits() - hits == len(expected) * SHARED
    assert _in_worker(engine, _open_gate, True) - before == SHARED // CHUNK
    check_idle(engine)


@pytest.mark.parametrize("seed", [1, 2])
def test_aborted_at_random_moments(engine, cases, reference, seed):
    """Issue 4, point 4: a hundred requests each, waiting, loading, computing or decoding."""
    rng = random.Random(seed)
    case = replace(cases.concurrent[0], max_tokens=4)
    other = cases.by_length[3 * CHUNK]
    for known in (case, other):
        engine.generate([known])
    core = engine.llm.llm_engine
    finished = 0
    for number in range(100):
        if rng.random() < 0.6:
            forget_memory(engine)
        _in_worker(engine, _open_gate, True, rng.choice([0.0, 0.002, 0.01]))
        name = f"{seed}-{number}"
        chosen = rng.choice([case, other])
        core.add_request(name, {"prompt_token_ids": list(chosen.tokens)}, chosen.params())
        threading.Event().wait(rng.choice([0.0, 0.002, 0.005, 0.02, 0.05]))
        if rng.random() < 0.2:
            done: dict[str, list[int]] = {}
            run(core, {name: chosen}, done, until=name)
            assert done[name] == reference[cases.concurrent[0]][0][:4] or chosen is other
            finished += 1
        else:
            core.abort_request([name])
    assert finished
    engine.generate([cases.by_length[1]])  # by its end, all aborts have arrived
    check_idle(engine)
    stopped = 'kvkeep_prefetches_total{outcome="stopped"}'
    assert engine.report().metrics.get(stopped, 0) > 0, "none was aborted while its chunks came"


def test_what_does_not_come_in_time_is_computed(running, cases, reference):
    """Fault 20: after its deadline a request goes on without, and nothing stays behind."""
    case = cases.concurrent[0]
    with running(SETTINGS | {"prefetch.timeout": "500ms"}) as engine:
        assert engine.generate([case])[0] == reference[case]
        forget_memory(engine)
        _in_worker(engine, _open_gate, False)
        hits = engine.external_hits()
        assert engine.generate([case])[0] == reference[case]
        assert engine.external_hits() == hits
        _in_worker(engine, _open_gate, True)
        check_idle(engine)
        forget_memory(engine)
        assert engine.generate([case])[0] == reference[case]
        assert engine.external_hits() - hits == SHARED
        check_idle(engine)
