"""Real vLLM over a slow tier (float32): one request waits for its chunks, and no other one does."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import pytest

from kvkeep.testing.chunks import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CHUNK = 256
#: A chunk of the tiny model: 256 tokens, 4 layers, K and V, 2 heads of 64 float32.
CHUNK_BYTES = 256 * 4 * 2 * 2 * 64 * 4
CPU, SLOW = "LocalCPUBackend", "SlowBackend"
SETTINGS = {
    "plugins": [{"name": SLOW, "module": "kvkeep.testing.faulty:SlowBackend"}],
    "cost.enabled": False,
    "cpu.size": 48 * CHUNK_BYTES,
    "prefetch.timeout": "55s",  # the gate of the slow tier opens by itself after a minute
    "identity.revision": "tiny",
}
ENGINE_ARGS = {"skip_tokenizer_init": True, "max_model_len": 2048}


@dataclass(frozen=True)
class Prompt:
    """Token ids, and how many to generate."""

    tokens: tuple[int, ...]
    max_tokens: int = 4

    def params(self):
        """vLLM's SamplingParams: greedy."""
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )


NUMBERS = random.Random(5)
DOCUMENT = tuple(NUMBERS.randrange(3, 900) for _ in range(4 * CHUNK))
SLOW_PROMPT = Prompt((*DOCUMENT, 7, 8, 9))
OTHER = Prompt(tuple(NUMBERS.randrange(3, 900) for _ in range(3 * CHUNK)))
QUICK = Prompt(tuple(NUMBERS.randrange(3, 900) for _ in range(100)), max_tokens=40)
SHORT = Prompt((5, 6, 7))
EIGHT = [Prompt((*DOCUMENT, *range(10, 30 + number))) for number in range(8)]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    """A Llama with random weights, so sharp that no rounding turns a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(tiny_model, running_model) -> dict[Prompt, list[int]]:
    """What the model answers without kvkeep."""
    prompts = [SLOW_PROMPT, OTHER, QUICK, *EIGHT]
    with running_model(tiny_model, None, **ENGINE_ARGS) as engine:
        return {prompt: engine.generate([prompt])[0][0] for prompt in prompts}


@pytest.fixture(autouse=True)
def _functions_travel():
    """The worker's process cannot import this module: its functions are sent whole."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=[False, True], ids=["before-steps", "between-steps"])
def engine(request, tiny_model, running_model, expected):
    """An engine with a slow tier; loads from memory into pages run before steps or between."""
    settings = SETTINGS | {"load.asynchronous": request.param}
    with running_model(tiny_model, settings, **ENGINE_ARGS) as engine:
        yield engine


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


def answers(engine, prompts: list[Prompt]) -> list[list[int]]:
    """Run prompts together; their tokens."""
    return [samples[0] for samples in engine.generate(prompts)]


def run(core, done: dict[str, list[int]], *, until: str) -> set[str]:
    """Step until a request is finished; the requests of all outputs meanwhile."""
    seen: set[str] = set()
    while until not in done:
        for output in core.step():
            seen.add(output.request_id)
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    return seen


def add(core, name: str, prompt: Prompt) -> None:
    core.add_request(name, {"prompt_token_ids": list(prompt.tokens)}, prompt.params())


def test_a_running_request_does_not_wait_for_another_ones_chunks(engine, expected):
    """Issue 4, point 3, by events: all of one request's steps happen while another one waits."""
    assert answers(engine, [SLOW_PROMPT]) == [expected[SLOW_PROMPT]]
    forget_memory(engine)
    _in_worker(engine, _open_gate, False)
    core = engine.llm.llm_engine
    done: dict[str, list[int]] = {}
    add(core, "slow", SLOW_PROMPT)
    add(core, "quick", QUICK)
    assert run(core, done, until="quick") == {"quick"}
    assert done["quick"] == expected[QUICK]
    hits = engine.external_hits()
    reads = _in_worker(engine, _open_gate, True)
    assert reads > 0, "its chunks were asked for meanwhile"
    run(core, done, until="slow")
    assert done["slow"] == expected[SLOW_PROMPT]
    assert engine.external_hits() - hits == len(DOCUMENT)
    check_idle(engine)


def test_eight_at_once_from_the_slow_tier(engine, expected):
    """They share four chunks, which are read once."""
    wanted = [expected[prompt] for prompt in EIGHT]
    assert answers(engine, EIGHT) == wanted
    forget_memory(engine)
    before = _in_worker(engine, _open_gate, True, 0.05)
    hits = engine.external_hits()
    assert answers(engine, EIGHT) == wanted
    assert engine.external_hits() - hits == len(EIGHT) * len(DOCUMENT)
    assert _in_worker(engine, _open_gate, True) - before == 1, "one window holds them all"
    check_idle(engine)


def test_aborted_at_random_moments_200_times(engine, expected):
    """Issue 4, point 4: waiting, loading, computing or decoding, a request may end."""
    rng = random.Random(1)
    answers(engine, [SLOW_PROMPT, OTHER])
    core = engine.llm.llm_engine
    finished = 0
    for number in range(200):
        if rng.random() < 0.6:
            forget_memory(engine)
        _in_worker(engine, _open_gate, True, rng.choice([0.0, 0.001, 0.005]))
        name = f"r{number}"
        prompt = rng.choice([SLOW_PROMPT, OTHER])
        add(core, name, prompt)
        threading.Event().wait(rng.choice([0.0, 0.002, 0.005, 0.01, 0.02]))
        if rng.random() < 0.1:
            done: dict[str, list[int]] = {}
            run(core, done, until=name)
            assert done[name] == expected[prompt]
            finished += 1
        else:
            core.abort_request([name])
    assert finished
    answers(engine, [SHORT])  # by its end, all aborts have arrived
    check_idle(engine)
    stopped = 'kvkeep_prefetches_total{outcome="stopped"}'
    assert engine.report().metrics.get(stopped, 0) > 0, "none was aborted while its chunks came"


def test_what_does_not_come_in_time_is_computed(tiny_model, running_model, expected):
    """Fault 20: after its deadline a request goes on without, and nothing stays behind."""
    settings = SETTINGS | {"prefetch.timeout": "500ms"}
    with running_model(tiny_model, settings, **ENGINE_ARGS) as engine:
        assert answers(engine, [SLOW_PROMPT]) == [expected[SLOW_PROMPT]]
        forget_memory(engine)
        _in_worker(engine, _open_gate, False)
        hits = engine.external_hits()
        assert answers(engine, [SLOW_PROMPT]) == [expected[SLOW_PROMPT]]
        assert engine.external_hits() == hits
        _in_worker(engine, _open_gate, True)
        check_idle(engine)
        forget_memory(engine)
        assert answers(engine, [SLOW_PROMPT]) == [expected[SLOW_PROMPT]]
        assert engine.external_hits() - hits == len(DOCUMENT)
        check_idle(engine)
