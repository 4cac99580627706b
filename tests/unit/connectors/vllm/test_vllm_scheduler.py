"""The vLLM connector under vLLM's own scheduler: what is loaded, stored and held, step by step."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvkeep.connectors.vllm import KVKeepConnector
from kvkeep.connectors.vllm.messages import LoadSpec, SaveSpec, StepMeta, WorkerMeta
from kvkeep.connectors.vllm.request import LoraNames, scope_of
from kvkeep.connectors.vllm.stats import KVKeepStats, StepStats
from kvkeep.connectors.vllm.worker import load_slots
from kvkeep.testing.chunks import wait_until
from kvkeep.tokens import PLAIN

BLOCK, CHUNK = 4, 8
PROMPT = [(7 * i) % 50 for i in range(40)]
OTHER = [(11 * i + 3) % 50 for i in range(40)]


def leases(engine) -> int:
    """Leases open in the worker."""
    return engine.client.check()[0].open_leases


def pins(engine) -> list[int]:
    """Pin counts of everything stored."""
    return [obj.pin_count for obj in engine.backend.hot_cache.values()]


def test_second_request_loads_what_the_first_stored(toy_engine):
    engine = toy_engine()
    first = engine.generate("a", PROMPT)
    assert engine.loaded_tokens == 0
    assert engine.generate("b", PROMPT) == first == engine.true_outputs("a")
    assert engine.loaded_tokens == 39  # all but the last token of five chunks
    engine.finish()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 39, 40])
def test_prompt_lengths_around_borders(toy_engine, length):
    engine = toy_engine()
    prompt = PROMPT[:length]
    engine.generate("a", prompt)
    engine.generate("b", prompt)
    assert engine.outputs("b") == engine.true_outputs("b")
    full = length // CHUNK * CHUNK
    assert engine.loaded_tokens == min(full, length - 1)
    assert engine.client.check()[0].num_chunks == length // CHUNK
    engine.finish()


def test_a_tail_that_fills_no_chunk_is_kept_on_request(toy_engine):
    engine = toy_engine(extra={"save_unfull_chunk": True})
    engine.generate("a", PROMPT[:21])
    engine.generate("b", PROMPT[:21])
    assert engine.loaded_tokens == 20
    engine.generate("c", PROMPT[:22])
    assert engine.loaded_tokens == 20 + 16
    assert engine.outputs("b") == engine.true_outputs("b")
    engine.check_stored()


def test_generated_tokens_are_stored_by_an_option(toy_engine):
    plain = toy_engine()
    plain.generate("a", PROMPT[:20], max_tokens=20)
    assert plain.client.check()[0].num_chunks == 2
    plain.finish()
    engine = toy_engine(extra={"store_decode": True})
    engine.generate("a", PROMPT[:20], max_tokens=20)
    assert engine.client.check()[0].num_chunks == 4  # 39 of 40 tokens have KV
    follow_up = PROMPT[:20] + engine.outputs("a") + [1, 2, 3]
    assert engine.generate("b", follow_up) == engine.true_outputs("b")
    assert engine.loaded_tokens == 32
    engine.finish()


def test_chunks_are_stored_as_chunked_prefill_fills_them(toy_engine):
    engine = toy_engine(max_num_batched_tokens=12, max_num_seqs=2)
    engine.add("a", PROMPT)
    counts = []
    while engine.advance():
        counts.append(engine.client.check()[0].num_chunks)
    assert sorted(set(counts)) == [0, 1, 3, 4, 5]
    assert engine.generate("b", PROMPT) == engine.true_outputs("b")
    engine.finish()


def test_engine_prefix_cache_and_kvkeep_share_a_prompt(toy_engine):
    """vLLM has the first blocks, kvkeep the rest; only the rest is loaded."""
    engine = toy_engine(enable_prefix_caching=True, num_blocks=24)
    engine.generate("a", PROMPT)
    engine.generate("b", OTHER)
    engine.generate("c", OTHER)  # pushes the end of a's blocks out of the engine, not its start
    before = engine.loaded_tokens
    assert engine.generate("d", PROMPT) == engine.true_outputs("d")
    assert engine.loaded_tokens > before
    engine.finish()


def test_nothing_is_asked_when_the_engine_has_it_all(toy_engine):
    engine = toy_engine(enable_prefix_caching=True)
    engine.generate("a", PROMPT)
    asked = engine.metric("kvkeep_lookup_tokens_total")
    engine.generate("b", PROMPT)
    assert engine.metric("kvkeep_lookup_tokens_total") == asked + 40  # the last block is missing
    engine.generate("c", PROMPT[:37])
    assert engine.metric("kvkeep_lookup_tokens_total") == asked + 40
    engine.finish()


def test_fault_47_a_waiting_request_is_counted_once(toy_engine):
    """Fault 47: counters grew while nothing happened, namely as long as a request waited."""
    engine = toy_engine(num_blocks=14)
    engine.generate("a", PROMPT)
    engine.add("b", PROMPT, max_tokens=12)
    engine.advance()
    engine.add("c", PROMPT, max_tokens=3)
    asked = engine.metric("kvkeep_lookup_tokens_total")
    engine.run_all()
    assert engine.metric("kvkeep_lookup_tokens_total") == asked + 40
    assert next(engine.connector._scheduler._asking._ids) > 6, "it was asked about again and again"
    engine.finish()


def test_fault_17_aborted_before_it_is_scheduled(toy_engine):
    """Fault 17: a lookup pinned, the request was aborted before it was scheduled.

    The pool of blocks is too small for two requests, so the second waits, asked about each step.
    """
    engine = toy_engine(num_blocks=14)
    engine.generate("a", PROMPT)
    engine.add("b", PROMPT, max_tokens=8)
    engine.advance()
    engine.add("c", PROMPT[:32] + OTHER[:8], max_tokens=8)
    engine.advance()
    engine.advance()
    engine.advance()
    assert engine.requests["c"].num_computed_tokens == 0
    assert len(engine.connector._scheduler._asking) == 0
    assert leases(engine) == 0
    engine.abort("c")
    engine.run_all()
    assert engine.outputs("b") == engine.true_outputs("b")
    assert set(pins(engine)) == {0}
    engine.finish()


def test_fault_17_aborted_between_planning_and_loading(toy_engine):
    """Fault 17: the load of a request that is gone is still carried out, and its lease ends."""
    engine = toy_engine(async_scheduling=True)
    engine.generate("a", PROMPT)
    engine.add("b", PROMPT)
    engine.schedule()
    assert leases(engine) == 1
    engine.abort("b")
    assert leases(engine) == 1  # it belongs to the step that was planned
    engine.run_all()
    assert leases(engine) == 0
    engine.finish()


def test_fault_21_each_lookup_has_a_lease_of_its_own(toy_engine):
    """Fault 21: a second lookup of a request neither loses nor takes the first one's pins."""
    engine = toy_engine()
    engine.generate("a", PROMPT)
    side = engine.connector._scheduler
    engine.add("b", PROMPT)
    request = engine.requests["b"]
    assert [side.match(request, 0) for _ in range(3)] == [39, 39, 39]
    assert leases(engine) == 1
    side.finished(request)
    assert leases(engine) == 0
    engine.abort("b")
    engine.finish()


def test_fault_24_a_dead_scheduler_leaves_leases_that_end(toy_engine):
    """Fault 24: nobody ends the lease of a scheduler that is gone; its deadline does."""
    engine = toy_engine(extra={"lookup.lease": "300ms", "lookup.timeout": "200ms"})
    engine.generate("a", PROMPT)
    lookup_id = "gone#0"
    assert engine.client.lookup(lookup_id, PROMPT) == 40
    assert set(pins(engine)) == {1}
    deadline = time.monotonic() + 10
    while set(pins(engine)) != {0} and time.monotonic() < deadline:
        engine.client.lookup("later", OTHER)
    assert set(pins(engine)) == {0}
    assert engine.metric("kvkeep_leases_expired_total") == 1
    engine.finish()


def test_fault_28_an_exception_in_a_hook_is_a_miss(toy_engine, monkeypatch):
    """Fault 28: whatever fails inside kvkeep, the engine goes on, and the failure is counted."""
    engine = toy_engine()
    engine.generate("a", PROMPT)

    def broken(*args, **kwargs):
        raise ZeroDivisionError("broken")

    side = engine.connector._scheduler
    monkeypatch.setattr(side, "match", broken)
    monkeypatch.setattr(side, "plan_saves", broken)
    monkeypatch.setattr(side, "finished", broken)
    assert engine.generate("b", OTHER) == engine.true_outputs("b")
    assert set(engine.connector.failures) == {
        "get_num_new_matched_tokens",
        "_plan_saves",
        "request_finished",
    }
    monkeypatch.undo()
    monkeypatch.setattr(engine.engine, "store", broken)
    assert engine.generate("c", OTHER[:20]) == engine.true_outputs("c")
    key = 'kvkeep_failures_total{tier="vllm",operation="store",cause="ZeroDivisionError"}'
    assert engine.metric(key) == 1
    monkeypatch.undo()
    assert engine.generate("d", PROMPT) == engine.true_outputs("d")
    assert leases(engine) == 0


def test_an_exception_after_allocation_breaks_the_promise_openly(toy_engine, monkeypatch):
    """The engine counts on the tokens already, so their blocks are reported as lost."""
    engine = toy_engine(policy="recompute")
    engine.generate("a", PROMPT)

    def broken(*args):
        raise RuntimeError("broken")

    engine.add("b", PROMPT)
    monkeypatch.setattr(engine.connector._scheduler, "allocated", broken)
    engine.schedule()
    monkeypatch.undo()
    engine.run_all()
    assert engine.num_failed_steps == 1
    assert engine.outputs("b") == engine.true_outputs("b")
    assert leases(engine) == 0


def test_fault_31_preempted_and_resumed(toy_engine):
    """Fault 31: block tables are asked for, never counted, and a resumed request goes on."""
    engine = toy_engine(num_blocks=20, max_num_seqs=3)
    for name, prompt in (("a", PROMPT[:24]), ("b", OTHER[:24]), ("c", PROMPT[8:32])):
        engine.add(name, prompt, max_tokens=24)
    engine.run_all()
    assert engine.num_preemptions > 0
    for name in "abc":
        assert engine.outputs(name) == engine.true_outputs(name)
    assert engine.loaded_tokens > 0
    engine.finish()


def test_fault_14_pages_of_a_preempted_request_are_not_saved(toy_engine):
    """Fault 14: what is stored under a request's tokens is never another request's page.

    The toy model checks every stored chunk against its tokens at the end.
    """
    engine = toy_engine(num_blocks=18, max_num_seqs=4, extra={"store_decode": True})
    for number in range(8):
        engine.add(f"r{number}", PROMPT[number : number + 20], max_tokens=30)
    engine.run_all()
    assert engine.num_preemptions > 3
    for number in range(8):
        assert engine.outputs(f"r{number}") == engine.true_outputs(f"r{number}")
    engine.finish()


def test_fault_9_salts_share_nothing(toy_engine):
    """Fault 9: two cache salts."""
    engine = toy_engine()
    for number, salt in enumerate(["x", "y", "", "x"]):
        engine.generate(f"r{number}", PROMPT, salt=salt)
        assert engine.outputs(f"r{number}") == engine.true_outputs(f"r{number}")
        assert engine.loaded_tokens == (39 if number == 3 else 0)
    engine.finish()


def make_request(req_id: str, **more) -> Request:
    from vllm import SamplingParams

    params = more.pop("params", None) or SamplingParams(max_tokens=1)
    return Request(req_id, list(PROMPT), params, None, **more)


def adapter(tmp_path: Path, name: str, content: bytes) -> str:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return str(folder)


def test_fault_9_adapters_share_nothing(tmp_path):
    """Fault 9: two LoRA adapters, also of one name; the same adapter elsewhere is the same."""
    names = LoraNames()

    def lora(path: str, number: int, **more) -> str | None:
        return names.name_of(LoRARequest("tuned", number, path, **more))

    one = lora(adapter(tmp_path, "one", b"1"), 1)
    two = lora(adapter(tmp_path, "two", b"2"), 2)
    copy = lora(adapter(tmp_path, "copy", b"1"), 3)
    assert one is not None
    assert len({one, two, copy}) == 2
    assert one == copy
    assert lora(str(tmp_path / "missing"), 4) is None
    (tmp_path / "empty").mkdir()
    assert lora(str(tmp_path / "empty"), 5) is None
    path = str(tmp_path / "one")
    assert lora(path, 1, load_inplace=True) is None
    assert lora(path, 1) is None, "its weights may change at any time"


def test_fault_9_a_request_of_an_adapter_without_a_name_is_left_alone(toy_engine, tmp_path):
    """Fault 9: no name, no sharing."""
    engine = toy_engine()
    for name in "ab":
        engine.generate(name, PROMPT, lora_request=LoRARequest("t", 1, str(tmp_path / "missing")))
    assert engine.loaded_tokens == 0
    assert engine.client.check()[0].num_chunks == 0
    engine.finish()


def image(content: str, offset: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", content, PlaceholderRange(offset, 4), content)


def test_fault_9_images_share_nothing():
    """Fault 9: two images at the same place, one image at two places."""
    scopes = {
        scope_of(make_request(str(i), mm_features=[image(content, offset)]), LoraNames())
        for i, (content, offset) in enumerate([("h" * 64, 4), ("h" * 63 + "i", 4), ("h" * 64, 5)])
    }
    assert len(scopes) == 3
    assert None not in scopes
    nameless = make_request("n", mm_features=[image("", 4)])
    assert scope_of(nameless, LoraNames()) is None


def test_tags_of_a_request_are_part_of_its_identity():
    from vllm import SamplingParams

    params = SamplingParams(extra_args={"kv_transfer_params": {"kvkeep.tag.team": "a", "x": 1}})
    scope = scope_of(make_request("r", params=params), LoraNames())
    assert scope.tags == (("team", "a"),)


def test_roles_and_skip_reading(toy_engine):
    from vllm import SamplingParams

    engine = toy_engine()
    engine.generate("a", PROMPT)
    engine.add("b", PROMPT)
    engine.requests["b"].skip_reading_prefix_cache = True
    engine.run_all()
    assert engine.loaded_tokens == 0
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache in (None, True)
    engine.finish()


def test_fault_46_every_setting_of_the_connector_has_its_effect(toy_engine, tmp_path):
    """Fault 46: an option needed a second one to have any effect."""
    engine = toy_engine(
        extra={
            "chunk_size": 2 * CHUNK,
            "lookup.timeout": "3s",
            "lookup.lease": "77s",
            "lookup.socket_dir": str(tmp_path / "sockets"),
            "identity.model": "named",
            "identity.tags": {"team": "a"},
            "cpu.copy_threads": 2,
        }
    )
    engine.generate("a", PROMPT)
    assert engine.client.check()[0].num_chunks == 2
    assert engine.client._timeout_s == 3
    assert engine.engine._storage.leases.timeout_s == 77
    assert len(list((tmp_path / "sockets").rglob("*.sock"))) == 1
    named = engine.engine.token_database.identity
    assert (named.model, named.tags, named.chunk_size) == ("named", (("team", "a"),), 2 * CHUNK)
    assert named.revision.startswith("toy;")
    assert engine.engine._connector._threads.num_threads == 2
    assert engine.generate("b", PROMPT) == engine.true_outputs("b")


def test_reset_forgets_everything_and_the_step_in_flight(toy_engine):
    engine = toy_engine(async_scheduling=True)
    engine.generate("a", PROMPT)
    engine.add("b", OTHER)
    engine.schedule()
    assert engine.scheduler.reset_connector_cache()
    engine.run_all()
    assert engine.client.check()[0].num_chunks == 0, "the step was computed before the reset"
    key = 'kvkeep_store_skipped_tokens_total{cause="stale step"}'
    assert engine.metric(key) == 40
    engine.generate("c", OTHER)
    assert engine.client.check()[0].num_chunks == 5
    engine.finish()


def test_fault_9_chunks_of_other_weights_are_not_found_after_a_reset(toy_engine):
    """Fault 9: another process on the same disk goes on storing what the old weights gave."""
    engine = toy_engine()
    engine.generate("a", PROMPT)
    engine.add("waiting", OTHER)
    assert engine.scheduler.reset_connector_cache()
    storage = engine.worker._worker._manager.storage
    shape, dtype, fmt = engine.engine._connector.chunk_shape(CHUNK)
    for prompt in (PROMPT, OTHER):  # as if the other process wrote them now
        keys = engine.engine.token_database.process_tokens(prompt).keys
        storage.batched_put(keys, storage.batched_allocate(shape, dtype, len(keys), fmt))
    engine.run_all()
    engine.generate("b", PROMPT)
    stats = engine.worker.get_kv_connector_stats().reduce()
    assert stats["loaded_tokens"] == 0
    engine.generate("c", PROMPT)
    assert engine.worker.get_kv_connector_stats().reduce()["loaded_tokens"] > 0
    storage.clear()  # what the other process wrote
    engine.finish()


def test_fault_9_a_reset_is_done_before_all_chunks_are_removed(toy_engine, monkeypatch):
    """Fault 9: vLLM's pause fails if a reset does; and nothing old is found meanwhile."""
    engine = toy_engine(extra={"lookup.timeout": "0.2s"})
    engine.generate("a", PROMPT)
    gate, clear = threading.Event(), engine.engine.clear

    def slow_clear(*args):
        assert gate.wait(20)
        return clear(*args)

    monkeypatch.setattr(engine.engine, "clear", slow_clear)
    assert engine.scheduler.reset_connector_cache()
    assert engine.generate("b", PROMPT) == engine.true_outputs("b")
    assert engine.loaded_tokens == 0
    gate.set()
    wait_until(lambda: engine.client.check()[0].num_chunks == 0)
    engine.generate("c", PROMPT)
    engine.generate("d", PROMPT)
    assert engine.loaded_tokens > 0
    engine.finish()


def test_a_reset_in_the_middle_of_a_save_forgets_that_too(toy_engine, monkeypatch):
    engine = toy_engine()
    store = engine.engine.store

    def store_after_reset(*args, **more):
        engine.worker._worker._resets.clear()
        return store(*args, **more)

    monkeypatch.setattr(engine.engine, "store", store_after_reset)
    assert engine.generate("a", PROMPT) == engine.true_outputs("a")
    assert engine.client.check()[0].num_chunks == 0
    monkeypatch.undo()
    engine.finish()


def test_a_forward_pass_that_raised_is_not_stored(toy_engine):
    """vLLM calls wait_for_save while the exception is on its way up."""
    engine = toy_engine()
    engine.add("a", PROMPT)
    engine.schedule()
    meta = engine._queue[0].scheduled.kv_connector_metadata
    assert len(meta.saves) == 1
    engine.worker.bind_connector_metadata(meta)
    with pytest.raises(RuntimeError, match="model"):
        try:
            raise RuntimeError("the model failed")
        finally:
            engine.worker.wait_for_save()
    assert engine.client.check()[0].num_chunks == 0
    engine.worker.clear_connector_metadata()
    engine.run_all()
    assert engine.client.check()[0].num_chunks == 5
    engine.finish()


def test_what_travels_between_vllms_processes_survives():
    spec = LoadSpec("r#0", b"\0" * 4, PLAIN, 0, 4, (1,))
    meta = StepMeta([spec], [SaveSpec("r", b"\0" * 4, PLAIN, 0, (1,))], {0: 1}, 2)
    for value in (meta, WorkerMeta({0: 1})):
        assert pickle.loads(pickle.dumps(value)) == value


def test_counters_for_vllms_log():
    stats = KVKeepStats.of(StepStats(loaded_tokens=3))
    assert not stats.is_empty()
    total = stats.aggregate(KVKeepStats.of(StepStats(loaded_tokens=4, stored_tokens=5)))
    again = KVKeepConnector.build_kv_connector_stats(total.to_dict())
    assert again.reduce() == {
        "loaded_tokens": 7,
        "stored_tokens": 5,
        "failed_tokens": 0,
        "failures": 0,
    }
    total.reset()
    assert total.is_empty()


def test_stats_of_a_step(toy_engine):
    engine = toy_engine()
    engine.generate("a", PROMPT)
    engine.generate("b", PROMPT)
    assert engine.metric("kvkeep_lookup_tokens_total") == 80  # the scheduler's count has arrived
    stats = engine.worker.get_kv_connector_stats().reduce()
    assert (stats["stored_tokens"], stats["loaded_tokens"]) == (40, 39)
    assert engine.worker.get_kv_connector_stats().is_empty()
    engine.finish()


def test_load_slots_leave_out_what_the_engine_has():
    spec = LoadSpec("r#0", b"\0" * 4 * 16, PLAIN, start=4, end=11, block_ids=(9, 5, 7))
    assert (
        load_slots(spec, BLOCK).tolist() == [-1] * 4 + [20, 21, 22, 23, 28, 29, 30, 31] + [-1] * 4
    )


@pytest.mark.parametrize(
    "spec",
    [
        LoadSpec("r#0", b"\0" * 4 * 16, PLAIN, start=4, end=13, block_ids=(9, 5, 7)),
        LoadSpec("r#0", b"\0" * 4 * 8, PLAIN, start=4, end=11, block_ids=(9, 5, 7)),
    ],
)
def test_load_slots_refuse_too_few(spec):
    with pytest.raises(ValueError, match="cannot hold"):
        load_slots(spec, BLOCK)


def test_worker_reports_are_joined_per_rank():
    joined = WorkerMeta({0: 1}).aggregate(WorkerMeta({1: 2})).aggregate(WorkerMeta({0: 3}))
    assert joined.failures == {0: 3, 1: 2}
