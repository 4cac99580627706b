"""vLLM with kvkeep and no settings at all: the same greedy tokens, cold and warm (float32)."""

from __future__ import annotations

import random

import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CHUNK, SHARED = 256, 1024


@pytest.fixture(scope="module")
def engine(start_engine):
    """No kvkeep setting is given; vLLM's own prefix cache is off."""
    return start_engine({})


@pytest.fixture(scope="module")
def chunk_bytes(engine, cases):
    """Bytes of a chunk of this model, read off a first store."""
    engine.generate([cases.by_length[CHUNK + 1]])
    report = engine.report()
    assert report.num_chunks == 1
    return report.used_bytes


@pytest.fixture(autouse=True)
def nothing_held(engine, chunk_bytes):
    yield
    engine.check_nothing_held(chunk_bytes=chunk_bytes)


def test_default_pool(engine):
    """Spec 11.1: 5 GB or half of the free memory, whichever is less."""
    capacity = engine.report().capacity_bytes
    assert capacity <= 5_000_000_000 + (16 << 20), "whole chunks and whole huge pages"
    assert capacity > min(5_000_000_000, psutil.virtual_memory().total // 2) * 0.2


def test_eight_concurrent_requests_twice(engine, cases, reference):
    expected = [reference[case] for case in cases.concurrent]
    assert engine.generate(cases.concurrent) == expected
    hits = engine.external_hits()
    asked = engine.counter("kvkeep_lookup_tokens_total")
    found = engine.counter("kvkeep_lookup_hit_tokens_total")
    loaded = engine.counter("kvkeep_loaded_tokens_total")
    stored = engine.counter("kvkeep_stored_tokens_total")
    assert engine.generate(cases.concurrent) == expected
    assert engine.external_hits() - hits == len(expected) * SHARED
    assert engine.counter("kvkeep_loaded_tokens_total") - loaded == len(expected) * SHARED
    assert engine.counter("kvkeep_lookup_hit_tokens_total") - found == len(expected) * SHARED
    assert engine.counter("kvkeep_lookup_tokens_total") - asked >= len(expected) * SHARED
    assert engine.counter("kvkeep_stored_tokens_total") == stored


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK])
def test_lengths_around_chunks(engine, cases, reference, length):
    case = cases.by_length[length]
    assert engine.generate([case])[0] == reference[case]
    hits = engine.external_hits()
    assert engine.generate([case])[0] == reference[case]
    assert engine.external_hits() - hits == min(length // CHUNK * CHUNK, length - 1)


def test_two_samples_of_a_prompt(engine, cases, reference):
    engine.generate([cases.by_length[2 * CHUNK]])
    for case in cases.sampled:
        hits = engine.external_hits()
        assert engine.generate([case])[0] == reference[case]
        assert engine.external_hits() - hits == 2 * (2 * CHUNK - 1)


def test_two_salts_share_nothing(engine, cases, reference):
    """Fault 9: two cache salts."""
    case = cases.by_length[2 * CHUNK]
    gained = []
    for salt in ("tenant a", "tenant b", "tenant a", "tenant b"):
        hits = engine.external_hits()
        assert engine.generate([case], salt=salt)[0] == reference[case]
        gained.append(engine.external_hits() - hits)
    assert gained == [0, 0, 2 * CHUNK - 1, 2 * CHUNK - 1]


@pytest.mark.parametrize("seed", [1, 2])
def test_aborts_at_random_moments(engine, cases, reference, seed):
    """Fault 17: waiting, loading, prefilling or decoding, a request may end at any moment."""
    rng = random.Random(seed)
    core = engine.llm.llm_engine
    todo = list(enumerate(rng.sample(cases.concurrent * 3, 24)))
    running: dict[str, object] = {}
    done: dict[str, list[int]] = {}
    aborted = 0
    while todo or running:
        for _ in range(rng.randint(0, 4)):
            if todo:
                number, case = todo.pop()
                name = f"{seed}-{number}"
                prompt = {"prompt_token_ids": list(case.tokens)}
                core.add_request(name, prompt, case.params())
                running[name] = case
        if running and rng.random() < 0.4:
            name = rng.choice(sorted(running))
            core.abort_request([name])
            del running[name]
            aborted += 1
        if not core.has_unfinished_requests():
            continue  # a step would wait for ever
        for output in core.step():
            if output.finished and output.request_id in running:
                case = running.pop(output.request_id)
                done[output.request_id] = list(output.outputs[0].token_ids)
                assert done[output.request_id] == reference[case][0]
    engine.generate([cases.by_length[1]])  # by its end, all aborts have arrived
    assert aborted > 4
    assert done


def test_vllms_own_metrics_have_kvkeeps_numbers(engine, cases):
    """Everything that the worker has counted, by rank, and where hits came from."""
    engine.generate(cases.concurrent)
    engine.generate(cases.concurrent)  # what the scheduler has counted meanwhile travels, too
    mine = engine.report().metrics
    shown: dict[str, float] = {}
    for metric in engine.llm.get_metrics():
        if metric.name.startswith("vllm:kvkeep_") and hasattr(metric, "value"):
            assert metric.labels["rank"] == "0"
            name = metric.name.removeprefix("vllm:")
            shown[name] = shown.get(name, 0.0) + metric.value
    for name in ("kvkeep_loaded_tokens", "kvkeep_stored_tokens", "kvkeep_lookup_hit_tokens"):
        total = sum(v for k, v in mine.items() if k.partition("{")[0] == f"{name}_total")
        assert shown[name] == total > 0, name
    by_source = {
        metric.labels["source"]: metric.value
        for metric in engine.llm.get_metrics()
        if metric.name == "vllm:prompt_tokens_cached_by_source"
    }
    assert by_source["host"] == engine.external_hits() > 0
    assert by_source["disk"] == by_source["external_unspecified"] == 0
