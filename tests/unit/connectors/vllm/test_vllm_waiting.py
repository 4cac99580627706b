"""Requests that wait for their chunks under vLLM's own scheduler: in the queue, never in a step."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest

from kvkeep.connectors.vllm import lookup_tracker
from kvkeep.connectors.vllm.messages import LoadSpec, WorkerMeta
from kvkeep.connectors.vllm.worker import BackgroundLoads
from kvkeep.testing.chunks import wait_until
from kvkeep.testing.faulty import SlowBackend
from kvkeep.tokens import PLAIN

PROMPT = [(7 * i) % 50 for i in range(40)]
OTHER = [(11 * i + 3) % 50 for i in range(40)]
CPU, SLOW = "LocalCPUBackend", "SlowBackend"
#: The toy model computes so quickly that loading from anywhere would never pay.
SLOW_TIER = {
    "plugins": [{"name": SLOW, "module": "kvkeep.testing.faulty:SlowBackend"}],
    "cost.enabled": False,
    "cpu.alloc_timeout": "50ms",
}
BETWEEN = {"load.asynchronous": True}


def slow_of(engine) -> SlowBackend:
    return engine.engine._storage.storage_backends[SLOW]


def prefetcher_of(engine):
    return engine.engine._storage.prefetcher


def store_slowly(engine, *prompts: list[int]) -> None:
    """Compute prompts, and leave their chunks in the slow tier alone."""
    for number, prompt in enumerate(prompts):
        engine.generate(f"stored-{number}", prompt)
    engine.client.clear([CPU])
    engine.scheduler.reset_prefix_cache()


def wait_for_reads(engine, count: int) -> None:
    wait_until(lambda: len(slow_of(engine).reads) >= count)


def steps(engine, count: int) -> None:
    """Schedule, run and settle so many whole steps."""
    for _ in range(count):
        engine.schedule()
        engine._run(engine._queue[-1])
        engine._settle()


def start_big(engine) -> None:
    """A request that has nearly all blocks of an engine of 14."""
    engine.add("big", OTHER, max_tokens=12)
    while not engine.num_output("big"):
        steps(engine, 1)


def wait_for_answer(engine) -> None:
    """The workers' answers have come; the next step knows them."""
    wait_until(lambda: prefetcher_of(engine).num_lookups == 0)
    engine.client.check()


@pytest.fixture
def waiting(toy_engine):
    """``waiting(**more)``: an engine whose PROMPT is in the slow tier, which is closed."""

    def make(**more):
        engine = toy_engine(extra=SLOW_TIER | more.pop("extra", {}), **more)
        store_slowly(engine, PROMPT)
        slow_of(engine).gate.clear()
        return engine

    return make


def test_not_yet_while_chunks_travel_then_the_number(waiting):
    """Spec 10.3: the step that loads finds them in memory, verified and leased."""
    engine = waiting()
    engine.add("r", PROMPT)
    steps(engine, 3)
    wait_for_reads(engine, 1)
    assert engine.requests["r"].num_computed_tokens == 0
    assert engine.planned_loads() == 0
    slow_of(engine).gate.set()
    wait_until(lambda: prefetcher_of(engine).num_lookups == 0)
    reads = len(slow_of(engine).reads)
    slow_of(engine).gate.clear()
    engine.run_all()
    assert engine.outputs("r") == engine.true_outputs("r")
    assert engine.loaded_tokens == 39
    assert len(slow_of(engine).reads) == reads, "a step asked the slow tier"
    slow_of(engine).gate.set()
    engine.finish()


def test_others_run_while_one_waits(waiting):
    """Issue 4, point 3, by counts: as many steps as without it, and none of them waits."""
    engine = waiting()
    engine.add("slow", PROMPT)
    engine.add("quick", OTHER, max_tokens=20)
    for _ in range(100):
        if engine.requests["quick"].is_finished():
            break
        steps(engine, 1)
    assert engine.outputs("quick") == engine.true_outputs("quick")
    assert engine.requests["slow"].num_computed_tokens == 0
    slow_of(engine).gate.set()
    engine.run_all()
    assert engine.outputs("slow") == engine.true_outputs("slow")
    assert engine.loaded_tokens == 39
    engine.finish()


def test_a_request_that_came_later_overtakes_one_that_waits(waiting):
    engine = waiting(max_num_seqs=1)
    engine.add("slow", PROMPT)
    steps(engine, 1)
    engine.add("quick", OTHER[:8], max_tokens=1)
    steps(engine, 2)
    assert engine.requests["quick"].is_finished()
    slow_of(engine).gate.set()
    engine.run_all()
    assert engine.outputs("slow") == engine.true_outputs("slow")
    engine.finish()


def test_chunks_travel_while_a_request_has_no_seat(toy_engine):
    """Issue 4, point 3: its wait is that for the seat or for the chunks, not for both in turn."""
    engine = toy_engine(extra=SLOW_TIER, max_num_seqs=1)
    store_slowly(engine, PROMPT, PROMPT[8:32])
    engine.add("running", OTHER, max_tokens=30)
    while not engine.num_output("running"):
        steps(engine, 1)
    engine.add("next", PROMPT)
    engine.add("third", PROMPT[8:32])
    steps(engine, 1)
    wait_until(lambda: engine.engine.check().open_leases == 2)
    assert not engine.requests["running"].is_finished()
    slow_of(engine).gate.clear()
    engine.run_all()
    assert engine.loaded_tokens == 39 + 23
    for name in ("running", "next", "third"):
        assert engine.outputs(name) == engine.true_outputs(name)
    slow_of(engine).gate.set()
    engine.finish()


@pytest.mark.parametrize("engine_has_it", [True, False])
def test_what_the_engine_has_itself_does_not_travel(toy_engine, engine_has_it):
    """Its own prefix cache is looked into before a request's turn, too."""
    prompt = [*PROMPT, 1, 2]
    engine = toy_engine(extra=SLOW_TIER, max_num_seqs=1, enable_prefix_caching=True)
    store_slowly(engine, prompt)
    if engine_has_it:
        engine.generate("again", prompt)
        engine.client.clear([CPU])
    loaded_before = engine.loaded_tokens
    engine.add("running", OTHER, max_tokens=10)
    steps(engine, 2)
    engine.add("next", prompt)
    steps(engine, 2)
    assert len(engine.connector._scheduler._asking) == (0 if engine_has_it else 1)
    engine.run_all()
    assert engine.loaded_tokens - loaded_before == (0 if engine_has_it else 40)
    assert engine.outputs("next") == engine.true_outputs("next")
    engine.finish()


def test_an_early_answer_is_asked_for_again(toy_engine):
    """Nobody had anything when the requests came; the first one stores it for the others."""
    engine = toy_engine(extra=SLOW_TIER, max_num_seqs=1)
    for name in "abc":
        engine.add(name, PROMPT)
    steps(engine, 1)
    wait_for_answer(engine)  # of those asked before anything was stored
    engine.run_all()
    assert engine.loaded_tokens == 2 * 39
    assert engine.metric("kvkeep_lookup_tokens_total") == 3 * 40
    assert engine.metric(f'kvkeep_lookup_hit_tokens_total{{tier="{CPU}"}}') == 2 * 40
    engine.finish()


def test_an_early_answer_is_counted_when_it_is_used(toy_engine):
    engine = toy_engine(extra=SLOW_TIER, max_num_seqs=1)
    store_slowly(engine, PROMPT)
    asked = engine.metric("kvkeep_lookup_tokens_total")
    engine.add("running", OTHER, max_tokens=10)
    steps(engine, 2)
    engine.add("next", PROMPT)
    engine.run_all()
    assert engine.metric("kvkeep_lookup_tokens_total") == asked + 80
    assert engine.metric(f'kvkeep_lookup_hit_tokens_total{{tier="{SLOW}"}}') == 40
    engine.finish()


def test_an_early_answer_is_not_relied_upon_when_its_lease_may_be_over(toy_engine, monkeypatch):
    """A lease begins when the chunks come, however late somebody looks at the answer."""
    engine = toy_engine(extra=SLOW_TIER, max_num_seqs=1)
    store_slowly(engine, PROMPT)
    engine.add("running", OTHER, max_tokens=10)
    steps(engine, 2)
    engine.add("next", PROMPT)
    steps(engine, 2)
    wait_for_answer(engine)
    side = engine.connector._scheduler
    [question] = side._asking._questions.values()
    now = time.monotonic
    monkeypatch.setattr(lookup_tracker, "time", SimpleNamespace(monotonic=lambda: now() + 1000.0))
    assert engine.engine.lookup_unpin(question.lookup_id), "the worker takes it back"
    engine.engine.clear()
    engine.run_all()
    assert engine.outputs("next") == engine.true_outputs("next")
    assert side._known_failures == {}, "what was not there any more was counted upon"
    engine.finish()


def test_only_a_few_are_asked_about_early(toy_engine, monkeypatch):
    monkeypatch.setattr(lookup_tracker, "MAX_EARLY", 2)
    engine = toy_engine(extra=SLOW_TIER, max_num_seqs=1)
    store_slowly(engine, PROMPT)
    slow_of(engine).gate.clear()
    engine.add("running", OTHER, max_tokens=8)
    steps(engine, 2)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        engine.add(name, PROMPT, max_tokens=1)
    steps(engine, 2)
    assert engine.client.num_started == 2
    engine.abort("r0")
    engine.abort("r5")
    steps(engine, 1)
    assert engine.client.num_started == 2
    slow_of(engine).gate.set()
    engine.run_all()
    assert engine.loaded_tokens == 4 * 39
    engine.finish()


def test_a_session_whose_tokens_are_rewritten_is_asked_about_anew(waiting):
    """A turn of a session may replace tokens while the request waits."""
    engine = waiting()
    engine.add("r", PROMPT, resumable=True)
    asking_side = engine.connector._scheduler._asking
    steps(engine, 2)
    [first] = asking_side._questions.values()
    steps(engine, 1)
    assert list(asking_side._questions.values()) == [first]
    engine.requests["r"]._all_token_ids[3] = 9
    steps(engine, 1)
    assert first not in asking_side._questions.values()
    engine.abort("r")
    slow_of(engine).gate.set()
    engine.run_all()


def test_what_is_in_memory_is_loaded_in_the_first_step(toy_engine):
    """Nobody is told "not yet" about what is there."""
    engine = toy_engine(extra=SLOW_TIER)
    engine.generate("a", PROMPT)
    slow_of(engine).gate.clear()
    engine.add("b", PROMPT)
    engine.schedule()
    assert engine.planned_loads() == 1
    engine.run_all()
    assert engine.outputs("b") == engine.true_outputs("b")
    engine.finish()


def test_what_is_nowhere_is_computed(toy_engine, monkeypatch):
    """The slow tier says so at once, and the request runs in its first step."""
    monkeypatch.setattr(lookup_tracker, "GRACE_S", 10.0)
    engine = toy_engine(extra=SLOW_TIER)
    engine.add("a", PROMPT)
    engine.schedule()
    assert engine._queue[-1].scheduled.num_scheduled_tokens == {"a": 40}
    engine.run_all()
    engine.finish()


def test_a_waiting_request_is_counted_once(waiting):
    """Fault 47: however often it is asked about."""
    engine = waiting()
    asked = engine.metric("kvkeep_lookup_tokens_total")
    engine.add("r", PROMPT)
    steps(engine, 5)
    slow_of(engine).gate.set()
    engine.run_all()
    assert engine.metric("kvkeep_lookup_tokens_total") == asked + 40
    assert engine.metric(f'kvkeep_lookup_hit_tokens_total{{tier="{SLOW}"}}') == 40
    engine.finish()


def test_fault_17_aborted_while_its_chunks_travel(waiting):
    """Fault 17: no lease, no event, no task is left; what arrives later goes back."""
    engine = waiting()
    engine.add("r", PROMPT)
    steps(engine, 2)
    wait_for_reads(engine, 1)
    engine.abort("r")
    wait_until(lambda: prefetcher_of(engine).num_lookups == 0)
    assert len(engine.connector._scheduler._asking) == 0
    assert engine.client.num_started == 0
    slow_of(engine).gate.set()
    engine.run_all()
    engine.finish()


def test_fault_17_aborted_when_its_chunks_are_there(waiting):
    """Fault 17: answered and held, and then never scheduled."""
    engine = waiting(num_blocks=14)
    start_big(engine)
    engine.add("r", PROMPT, max_tokens=1)
    steps(engine, 1)
    slow_of(engine).gate.set()
    wait_for_answer(engine)
    steps(engine, 1)
    assert engine.client.check()[0].open_leases == 1, "held for the request, which has no blocks"
    reads = len(slow_of(engine).reads)
    steps(engine, 2)
    assert len(slow_of(engine).reads) == reads, "it was not asked for again"
    engine.abort("r")
    engine.run_all()
    assert engine.outputs("big") == engine.true_outputs("big")
    engine.finish()


def test_fault_20_a_deadline_makes_a_miss_and_leaves_nothing(waiting):
    """Fault 20: the request goes on without what did not come in time."""
    engine = waiting(extra={"prefetch.timeout": "200ms"})
    engine.add("r", PROMPT)
    engine.run_all()
    assert engine.outputs("r") == engine.true_outputs("r")
    assert engine.loaded_tokens == 0
    slow_of(engine).gate.set()
    engine.finish()


def test_what_was_found_is_not_relied_upon_for_ever(waiting):
    """The worker's lease has a deadline; the scheduler asks again before it."""
    engine = waiting(num_blocks=14)
    side = engine.connector._scheduler
    start_big(engine)
    engine.add("r", PROMPT, max_tokens=1)
    steps(engine, 1)
    slow_of(engine).gate.set()
    wait_for_answer(engine)
    steps(engine, 1)
    [question] = side._asking._questions.values()
    question.held_until = 0.0001
    steps(engine, 1)
    assert question not in side._asking._questions.values()
    engine.run_all()
    assert engine.outputs("r") == engine.true_outputs("r")
    engine.finish()


def test_a_reset_gives_up_what_travels(waiting):
    engine = waiting()
    engine.add("r", PROMPT)
    steps(engine, 1)
    wait_for_reads(engine, 1)
    assert engine.scheduler.reset_connector_cache()
    slow_of(engine).gate.set()
    engine.run_all()
    assert engine.outputs("r") == engine.true_outputs("r")
    assert engine.loaded_tokens == 0, "it has another name now"
    engine.finish()


def test_an_engine_with_nothing_to_do_waits_for_a_word(waiting, monkeypatch):
    """Fault 30: it neither spins nor sleeps: it waits on the socket, and only where it is idle."""
    engine = waiting()
    waits = []
    wait = engine.client.wait
    monkeypatch.setattr(engine.client, "wait", lambda s: (waits.append(s), wait(s)))
    engine.add("r", PROMPT)
    engine.add("busy", OTHER, max_tokens=10)
    while not engine.num_output("busy"):
        steps(engine, 1)
    waits.clear()
    steps(engine, 6)
    assert lookup_tracker.IDLE_WAIT_S not in waits
    while not engine.requests["busy"].is_finished():
        steps(engine, 1)
    steps(engine, 6)
    assert waits.count(lookup_tracker.IDLE_WAIT_S) >= 2
    slow_of(engine).gate.set()
    engine.run_all()
    engine.finish()


def test_an_engine_with_nothing_to_do_loads_in_the_step_of_the_answer(waiting, monkeypatch):
    """It does not go round, in which an answer that has come would not be seen."""
    monkeypatch.setattr(lookup_tracker, "IDLE_WAIT_S", 60.0)
    engine = waiting()
    opening = threading.Timer(0.1, slow_of(engine).gate.set)
    opening.start()
    engine.add("r", PROMPT)
    engine.schedule()
    assert engine.planned_loads() == 1
    opening.join(10)
    engine.run_all()
    assert engine.outputs("r") == engine.true_outputs("r")
    engine.finish()


def test_no_step_waits_for_one_request_while_another_has_its_turn(waiting, monkeypatch):
    """Not even as little as an idle engine would."""
    monkeypatch.setattr(lookup_tracker, "IDLE_WAIT_S", 60.0)
    engine = waiting()
    engine.add("slow", PROMPT)
    engine.add("quick", OTHER, max_tokens=3)
    while not engine.num_output("quick"):
        steps(engine, 1)
    assert engine.requests["slow"].num_computed_tokens == 0
    slow_of(engine).gate.set()
    engine.run_all()
    assert engine.outputs("slow") == engine.true_outputs("slow")
    engine.finish()


def test_prefetches_can_be_switched_off(toy_engine):
    """Fault 46: then a step waits for the lookup, as before."""
    engine = toy_engine(extra=SLOW_TIER | {"prefetch.enabled": False})
    store_slowly(engine, PROMPT)
    engine.add("r", PROMPT)
    engine.schedule()
    assert engine.planned_loads() == 1
    engine.run_all()
    assert engine.loaded_tokens == 39
    engine.finish()


def test_fault_46_the_memory_of_waiting_requests_is_bounded(toy_engine):
    """Fault 46: prefetch.memory and prefetch.timeout have their effects."""
    chunk = 8 * 512 * 2
    engine = toy_engine(extra=SLOW_TIER | {"prefetch.memory": 2 * chunk, "prefetch.timeout": "7s"})
    options = prefetcher_of(engine)._options
    assert options.timeout_s == 7
    assert options.max_chunks == 2
    store_slowly(engine, PROMPT)
    assert engine.generate("r", PROMPT) == engine.true_outputs("r")
    assert engine.loaded_tokens == 16
    engine.finish()


# -- loads between steps ---------------------------------------------------------------------


def test_a_load_between_steps(toy_engine):
    """The request waits for the copy, and its load is checked byte by byte when it is reported."""
    engine = toy_engine(extra=BETWEEN)
    engine.generate("a", PROMPT)
    engine.add("b", PROMPT)
    engine.schedule()
    step = engine._queue[-1].scheduled
    assert step.total_num_scheduled_tokens == 0
    assert not step.has_sync_kv_loads
    assert engine.requests["b"].status.name == "WAITING_FOR_REMOTE_KVS"
    engine.run_all()
    assert engine.outputs("b") == engine.true_outputs("b")
    assert engine.loaded_tokens == 39
    assert engine.worker.get_kv_connector_stats().reduce()["loaded_tokens"] == 39
    engine.finish()


def block_loads(engine, monkeypatch) -> threading.Event:
    """Loads wait for the event that is returned."""
    gate = threading.Event()
    load = engine.worker._worker._background._load

    def slow(spec):
        assert gate.wait(20)
        return load(spec)

    monkeypatch.setattr(engine.worker._worker._background, "_load", slow)
    return gate


def test_others_run_while_one_loads(toy_engine, monkeypatch):
    engine = toy_engine(extra=BETWEEN)
    engine.generate("a", PROMPT)
    gate = block_loads(engine, monkeypatch)
    engine.add("slow", PROMPT)
    engine.add("quick", OTHER, max_tokens=10)
    for _ in range(60):
        if engine.requests["quick"].is_finished():
            break
        steps(engine, 1)
    assert engine.outputs("quick") == engine.true_outputs("quick")
    assert engine.num_output("slow") == 0
    gate.set()
    engine.run_all()
    assert engine.outputs("slow") == engine.true_outputs("slow")
    engine.finish()


def test_fault_32_aborted_while_it_loads(toy_engine, monkeypatch):
    """Fault 32: its blocks are kept until the load is reported, and then free again."""
    engine = toy_engine(extra=BETWEEN, num_blocks=14)
    engine.generate("a", PROMPT)
    gate = block_loads(engine, monkeypatch)
    engine.add("b", PROMPT)
    steps(engine, 1)
    engine.abort("b")
    engine.add("c", OTHER[:16])
    steps(engine, 3)
    assert engine.num_output("c") == 0, "the blocks of b are still written to"
    gate.set()
    engine.run_all()
    assert engine.outputs("c") == engine.true_outputs("c")
    engine.finish()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_fault_32_a_load_that_fails_is_reported_as_finished(toy_engine, policy):
    """Fault 32: a failed asynchronous load was not reported; the request waited for ever."""
    engine = toy_engine(extra=BETWEEN, policy=policy)
    engine.generate("a", PROMPT)
    engine.add("b", PROMPT)
    engine.add("bystander", OTHER)
    engine.schedule()
    engine.engine._storage.leases.release_all()
    engine.engine.clear()
    engine.run_all()
    assert engine.loaded_tokens == 0
    if policy == "recompute":
        assert engine.outputs("b") == engine.true_outputs("b")
    else:
        assert engine.requests["b"].get_finished_reason().name == "ERROR"
    assert engine.outputs("bystander") == engine.true_outputs("bystander")
    assert engine.num_failed_steps == 0, "nothing was computed on what is not there"
    assert engine.client.check()[0].num_chunks >= 5, "so what others computed is stored"
    engine.finish()


def test_fault_32_a_load_that_always_fails_is_not_tried_for_ever(toy_engine, monkeypatch):
    """Fault 32: found again, failed again."""
    engine = toy_engine(extra=BETWEEN, policy="recompute")
    engine.generate("a", PROMPT)
    tried = []

    def broken(*args, **more):
        tried.append(1)
        raise RuntimeError("the copy fails")

    monkeypatch.setattr(engine.engine, "retrieve", broken)
    assert engine.generate("b", PROMPT) == engine.true_outputs("b")
    assert len(tried) == 1
    monkeypatch.undo()
    assert engine.generate("c", PROMPT) == engine.true_outputs("c")
    assert engine.loaded_tokens == 39
    engine.finish()


def test_fault_32_a_promise_that_cannot_be_planned_ends_too(toy_engine, monkeypatch):
    """Fault 32: the engine counts on a load already, and planning it raises."""
    engine = toy_engine(extra=BETWEEN, policy="recompute")
    engine.generate("a", PROMPT)

    def broken(*args):
        raise RuntimeError("broken")

    engine.add("b", PROMPT)
    monkeypatch.setattr(engine.connector._scheduler, "allocated", broken)
    engine.schedule()
    monkeypatch.undo()
    engine.run_all()
    assert engine.outputs("b") == engine.true_outputs("b")
    assert engine.client.check()[0].open_leases == 0


def test_fault_32_a_worker_without_a_cache_reports_the_load(toy_engine):
    """Fault 32: whoever cannot load says so, in the same step."""
    engine = toy_engine(extra=BETWEEN)
    engine.generate("a", PROMPT)
    engine.add("b", PROMPT)
    engine.schedule()
    meta = engine._queue[-1].scheduled.kv_connector_metadata
    worker = engine.worker
    worker.bind_connector_metadata(meta)
    side, worker._worker = worker._worker, None
    worker.start_load_kv(None)
    assert worker.get_finished(set()) == (None, {"b"})
    assert worker.get_block_ids_with_load_errors() == set(meta.loads[0].block_ids)
    worker._worker = side
    worker.clear_connector_metadata()
    engine.run_all()
    engine.finish()


def test_fault_32_loads_end_where_the_system_has_no_thread(toy_engine, monkeypatch):
    """Fault 32: the request of a load that nobody can carry out goes on, and so do later ones."""
    engine = toy_engine(extra=BETWEEN, policy="recompute")
    engine.generate("a", PROMPT)

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", start)
        assert engine.generate("b", PROMPT) == engine.true_outputs("b")
        assert engine.loaded_tokens == 0
    assert engine.generate("c", PROMPT) == engine.true_outputs("c")
    assert engine.loaded_tokens == 39
    engine.finish()


def test_background_loads_come_out_once_whatever_happens():
    specs = [LoadSpec("", b"", PLAIN, 4, 8, (), req_id=str(n)) for n in range(4)]
    started, gate = threading.Event(), threading.Event()

    def load(spec):
        started.set()
        assert gate.wait(20)
        return spec.end

    loads = BackgroundLoads(load)
    loads.close()  # no thread
    loads = BackgroundLoads(load)
    for spec in specs[:3]:
        loads.submit(spec)
    assert started.wait(20)
    assert loads.take_done() == []
    threading.Timer(0.05, gate.set).start()
    loads.close()
    loads.close()
    loads.submit(specs[3])
    done = {spec.req_id: loaded_to for spec, loaded_to in loads.take_done()}
    assert done == {"0": 8, "1": 4, "2": 4, "3": 4}
    assert loads.take_done() == []


def test_reports_of_ranks_are_joined():
    joined = WorkerMeta({0: 1}, {"a"}).aggregate(WorkerMeta({1: 2}, {"b"}))
    assert (joined.failures, joined.failed_requests) == ({0: 1, 1: 2}, {"a", "b"})


# -- random lives -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("extra", [{}, BETWEEN], ids=["sync", "between"])
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["plain", "async"])
def test_random_lives(toy_engine, options, extra, seed):
    """Added, aborted and preempted at random while chunks travel, are evicted, and come again."""
    rng = random.Random(seed)
    engine = toy_engine(
        num_blocks=rng.choice([28, 60]),
        pool_chunks=rng.choice([4, 60]),
        policy="recompute",
        enable_prefix_caching=rng.random() < 0.5,
        max_num_batched_tokens=rng.choice([24, 512]),
        extra=SLOW_TIER | extra,
        **options,
    )
    slow_of(engine).seconds_per_chunk = 0.0005
    parents = [[(step * i + step) % 50 for i in range(64)] for step in (7, 11, 13)]
    alive: list[str] = []
    aborted: set[str] = set()
    for number in range(60):
        name = f"r{number}"
        length = rng.choice([7, 8, 9, 16, 17, 33, 40, rng.randint(1, 60)])
        engine.add(name, rng.choice(parents)[:length], max_tokens=rng.choice([1, 3, 12]))
        alive.append(name)
        for _ in range(rng.randint(0, 12)):
            engine.advance(rng.randrange)
        if rng.random() < 0.3:
            victim = rng.choice(alive)
            if not engine.requests[victim].is_finished():
                engine.abort(victim)
                aborted.add(victim)
        if rng.random() < 0.2:
            engine.backend.batched_remove(engine.backend.keys())
    engine.run_all(rng.randrange)
    for name in engine.requests.keys() - aborted:
        assert engine.outputs(name) == engine.true_outputs(name), name
    assert engine.loaded_tokens > 0
    engine.finish()


def test_aborted_at_random_moments_200_times(toy_engine):
    """Issue 4, point 4: no lease, no event, no task, no memory is left."""
    rng = random.Random(11)
    engine = toy_engine(extra=SLOW_TIER)
    store_slowly(engine, PROMPT, OTHER)
    slow_of(engine).seconds_per_chunk = 0.0005
    finished = 0
    for number in range(200):
        name = f"r{number}"
        engine.add(name, rng.choice([PROMPT, OTHER]), max_tokens=1)
        for _ in range(rng.randint(0, 9)):
            engine.advance()
        if engine.requests[name].is_finished():
            finished += 1
        else:
            engine.abort(name)
        if rng.random() < 0.5:
            engine.backend.batched_remove(engine.backend.keys())
    assert 0 < finished < 200
    engine.finish()
