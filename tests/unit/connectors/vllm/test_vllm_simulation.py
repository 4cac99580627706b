"""Random lives of requests under vLLM's own scheduler, every page checked against its tokens."""

from __future__ import annotations

import random

import pytest

PARENTS = [[(step * i + step) % 50 for i in range(64)] for step in (7, 11, 13)]


def random_prompt(rng: random.Random) -> list[int]:
    """A prompt that shares a prefix with others, its length near a border more often than not."""
    length = rng.choice([1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 47, rng.randint(1, 60)])
    parent = rng.choice(PARENTS)
    shared = rng.choice([length, length, max(0, length - 3), length // 2])
    return parent[:shared] + [rng.randrange(50) for _ in range(length - shared)]


def live(engine, rng: random.Random, *, num_requests: int, disturb=lambda: None) -> set[str]:
    """Add, abort and advance at random until all requests are over; names of the aborted.

    ``disturb`` is called before every move.
    """
    names = [f"r{number}" for number in range(num_requests)]
    waiting, alive, aborted = list(names), [], set()
    for _ in range(20_000):
        action = rng.random()
        if waiting and action < 0.2:
            name = waiting.pop()
            alive.append(name)
            engine.add(
                name,
                random_prompt(rng),
                max_tokens=rng.choice([1, 2, 5, 20]),
                salt=rng.choice(["", "", "x"]),
            )
        elif alive and action < 0.23:
            name = rng.choice(alive)
            if not engine.requests[name].is_finished():
                engine.abort(name)
                aborted.add(name)
        disturb()
        if action > 0.23 and not engine.advance(rng.randrange) and not waiting:
            return aborted
    raise AssertionError("the requests do not end")


def vanish(engine, rng: random.Random) -> None:
    """Now and then, before a load that was planned: its lease runs out and some chunks go."""
    if rng.random() < 0.3 and engine.planned_loads():
        engine.engine._storage.leases.release_all()
        keys = engine.backend.keys()
        engine.backend.batched_remove(rng.sample(keys, rng.randint(0, len(keys))))


def check_outputs(engine, *, but: set[str]) -> None:
    """Every request that was not aborted has the tokens of the toy model."""
    for name in engine.requests.keys() - but:
        assert engine.outputs(name) == engine.true_outputs(name), name
    for name in but:
        outputs = engine.outputs(name)
        assert outputs == engine.true_outputs(name)[: len(outputs)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pool_chunks", [0.5, 3, 60])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_random_lives(toy_engine, prefix_caching, asynchronous, pool_chunks, seed):
    rng = random.Random(f"{seed}{pool_chunks}")
    engine = toy_engine(
        num_blocks=rng.choice([28, 60]),
        pool_chunks=pool_chunks,
        enable_prefix_caching=prefix_caching,
        async_scheduling=asynchronous,
        max_num_batched_tokens=rng.choice([16, 24, 512]),
        extra={"store_decode": rng.random() < 0.5, "save_unfull_chunk": rng.random() < 0.3},
    )
    aborted = live(engine, rng, num_requests=40)
    check_outputs(engine, but=aborted)
    assert aborted
    if pool_chunks == 60:
        assert engine.loaded_tokens > 0
    if pool_chunks == 0.5:
        assert engine.client.check()[0].num_chunks == 0
    engine.finish()


def fail_one_load(engine) -> None:
    """A request whose chunks vanish between lookup and load, while another one runs."""
    engine.generate("first", PARENTS[0][:40])
    engine.scheduler.reset_prefix_cache()
    engine.add("victim", PARENTS[0][:40])
    engine.add("bystander", PARENTS[1][:40], max_tokens=4)
    engine.schedule()
    assert engine.planned_loads() == 1
    engine.engine._storage.leases.release_all()
    engine.engine.clear()
    engine.run_all()
    assert engine.num_failed_steps == 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_failed_loads_never_poison_the_cache(toy_engine, prefix_caching, asynchronous, seed):
    """Leases run out and chunks vanish between lookup and load: requests fail, nothing else.

    The step that should have loaded computes on garbage, and so may the one after it; none of that
    is stored.
    """
    rng = random.Random(seed)
    engine = toy_engine(
        num_blocks=40, enable_prefix_caching=prefix_caching, async_scheduling=asynchronous
    )
    fail_one_load(engine)
    aborted = live(engine, rng, num_requests=60, disturb=lambda: vanish(engine, rng))
    failed = {
        name
        for name, request in engine.requests.items()
        if request.get_finished_reason().name == "ERROR"
    }
    assert "victim" in failed
    assert engine.outputs("bystander") == engine.true_outputs("bystander")
    check_outputs(engine, but=aborted | failed)
    engine.finish()


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_failed_loads_are_computed_again(toy_engine, seed, prefix_caching):
    """The same under the policy ``recompute``: no request is lost."""
    rng = random.Random(seed)
    engine = toy_engine(num_blocks=60, policy="recompute", enable_prefix_caching=prefix_caching)
    fail_one_load(engine)
    aborted = live(engine, rng, num_requests=60, disturb=lambda: vanish(engine, rng))
    check_outputs(engine, but=aborted)
    engine.finish()


def test_after_a_failed_load_nothing_suspicious_is_stored(toy_engine):
    """Not of the requests that lived then, nor of those that came while one of them lived."""
    engine = toy_engine(policy="recompute", max_num_batched_tokens=48)
    engine.generate("first", PARENTS[0][:40])
    engine.add("victim", PARENTS[0][:40])
    engine.add("bystander", PARENTS[1][:64], max_tokens=20)
    engine.schedule()
    engine.engine._storage.leases.release_all()
    engine.engine.clear()
    while engine.requests["bystander"].num_output_tokens < 3:
        engine.advance()
    assert engine.num_failed_steps == 1
    engine.add("newcomer", PARENTS[2][:40])
    engine.run_all()
    assert engine.client.check()[0].num_chunks == 0
    for name in engine.requests:
        assert engine.outputs(name) == engine.true_outputs(name)
    engine.generate("later", PARENTS[2][:40])
    assert engine.client.check()[0].num_chunks == 5
    engine.finish()
