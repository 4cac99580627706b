"""Few blocks and small steps: chunked prefill and preemption (float32)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CHUNK, BLOCK, SHARED = 256, 128, 1024
STEP = 192
#: One is vLLM's own; four prompts of four blocks fit, until the first of them needs a fifth.
NUM_BLOCKS = 17


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine(
        {"chunk_size": CHUNK, "store_decode": True},
        max_num_batched_tokens=STEP,
        num_gpu_blocks_override=NUM_BLOCKS,
    )


@pytest.fixture(autouse=True)
def nothing_held(engine):
    yield
    engine.check_nothing_held()


def test_chunked_prefill(engine, cases, reference):
    """A prompt takes six steps, and what they store is found by the next request at once."""
    expected = [reference[case] for case in cases.concurrent]
    assert engine.generate(cases.concurrent) == expected
    assert engine.external_hits() > 0
    hits = engine.external_hits()
    assert engine.generate(cases.concurrent) == expected
    assert engine.external_hits() - hits == len(expected) * SHARED


def test_preemption(engine, cases, reference):
    """Faults 14 and 31: requests lose their pages while they run, and get others."""
    expected = [reference[case] for case in cases.growing]
    preemptions = engine.metric("num_preemptions")
    assert engine.generate(cases.growing) == expected
    assert engine.metric("num_preemptions") > preemptions
    again = engine.metric("num_preemptions")
    hits = engine.external_hits()
    assert engine.generate(cases.growing) == expected
    assert engine.metric("num_preemptions") > again
    assert engine.external_hits() - hits >= len(expected) * CHUNK


def test_generated_tokens_are_found_again(engine, cases, reference):
    """A prompt of 504 tokens and eight answered ones fill the second chunk."""
    case = cases.growing[0]
    answer = reference[case][0]
    turn = replace(case, tokens=(*case.tokens, *answer[:20]), max_tokens=len(answer) - 20)
    hits = engine.external_hits()
    assert engine.generate([turn])[0] == [answer[20:]]
    assert engine.external_hits() - hits == 2 * CHUNK


def test_aborts_under_pressure(engine, cases, reference):
    """Fault 17: preempted, half prefilled or waiting, a request may end at any moment."""
    rng = random.Random(3)
    core = engine.llm.llm_engine
    todo = list(enumerate([*cases.growing, *cases.concurrent, *cases.growing]))
    running: dict[str, object] = {}
    finished = aborted = 0
    while todo or running:
        if todo and rng.random() < 0.5:
            number, case = todo.pop()
            prompt = {"prompt_token_ids": list(case.tokens)}
            core.add_request(f"p{number}", prompt, case.params())
            running[f"p{number}"] = case
        if running and rng.random() < 0.1:
            name = rng.choice(sorted(running))
            core.abort_request([name])
            del running[name]
            aborted += 1
        if not core.has_unfinished_requests():
            continue  # a step would wait for ever
        for output in core.step():
            if output.finished and output.request_id in running:
                case = running.pop(output.request_id)
                assert list(output.outputs[0].token_ids) == reference[case][0]
                finished += 1
    engine.generate([cases.by_length[1]])  # by its end, all aborts have arrived
    assert aborted
    assert finished
