"""What tells requests apart whose tokens are the same: adapters that change, images by any name."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvkeep.connectors.vllm import request as requests
from kvkeep.connectors.vllm.request import LoraNames, scope_of

PROMPT = [(7 * i) % 50 for i in range(40)]
HASH = "0123456789abcdef" * 4


def write_adapter(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return str(folder)


def test_fault_9_an_adapter_whose_files_change_is_not_cached_any_more(tmp_path):
    """Fault 9: vLLM reads them again when it had to make room for others in between."""
    names = LoraNames()
    path = write_adapter(tmp_path / "a", b"1")
    assert names.name_of(LoRARequest("a", 1, path)) is not None
    assert names.name_of(LoRARequest("a", 1, path)) is not None
    write_adapter(tmp_path / "a", b"2")
    assert names.name_of(LoRARequest("a", 1, path)) is None
    write_adapter(tmp_path / "a", b"1")
    assert names.name_of(LoRARequest("a", 1, path)) is None, "nobody knows what the engine has"
    assert LoraNames().name_of(LoRARequest("a", 1, path)) is not None


def test_fault_9_two_adapters_of_one_number(tmp_path):
    """Fault 9: vLLM goes by the number, and computes with the one that it has."""
    names = LoraNames()
    one = write_adapter(tmp_path / "one", b"1")
    two = write_adapter(tmp_path / "two", b"2")
    assert names.name_of(LoRARequest("one", 1, one)) is not None
    assert names.name_of(LoRARequest("two", 1, two)) is None
    assert names.name_of(LoRARequest("one", 1, one)) is None


def test_fault_9_how_an_adapter_is_read_and_applied(tmp_path):
    """Fault 9: settings of the engine and of the request."""
    path = write_adapter(tmp_path / "a", b"1")
    texts = {
        LoraNames().name_of(LoRARequest("a", 1, path)),
        LoraNames("targets").name_of(LoRARequest("a", 1, path)),
        LoraNames().name_of(LoRARequest("a", 1, path, is_3d_lora_weight=True)),
    }
    assert len(texts) == 3
    assert None not in texts


def test_fault_9_what_an_adapter_computes_after_a_change_is_not_stored(toy_engine, tmp_path):
    """Fault 9: its files change while a request of it waits or runs."""
    engine = toy_engine(max_num_batched_tokens=16)
    path = write_adapter(tmp_path / "a", b"1")
    engine.add("r", PROMPT, lora_request=LoRARequest("a", 1, path))
    engine.schedule()
    assert len(engine._queue[-1].scheduled.kv_connector_metadata.saves) == 1
    write_adapter(tmp_path / "a", b"2")
    engine.run_all()
    assert engine.client.check()[0].num_chunks == 2
    engine.generate("s", PROMPT, lora_request=LoRARequest("a", 1, path))
    assert engine.loaded_tokens == 0
    engine.finish()


def with_image(name: str, mm_hash: str | None = None) -> Request:
    feature = MultiModalFeatureSpec(None, "image", name, PlaceholderRange(4, 4), mm_hash or name)
    return Request("r", list(PROMPT), SamplingParams(max_tokens=1), None, mm_features=[feature])


@pytest.mark.parametrize(
    ("name", "mm_hash", "is_hashed"),
    [
        ("renderer0-mm-1-image-0", None, True),
        ("sku-17", None, True),
        (HASH, None, False),
    ],
    ids=["counted by vLLM", "named by the client", "hash of a counted name"],
)
def test_fault_9_images_without_a_hash_mean_nothing_after_a_restart(name, mm_hash, is_hashed):
    """Fault 9: vLLM counts images from one where neither of its caches needs their hashes."""

    def scope():
        return scope_of(with_image(name, mm_hash), LoraNames(), inputs_are_hashed=is_hashed)

    before = scope()
    assert scope() == before
    requests._own_tag.cache_clear()  # another process
    assert scope() != before


@pytest.mark.parametrize(
    ("name", "mm_hash"), [(HASH, None), (2 * HASH, None), (f"adapter:{HASH}", HASH)]
)
def test_images_with_a_hash_are_the_same_in_every_process(name, mm_hash):
    before = scope_of(with_image(name, mm_hash), LoraNames())
    requests._own_tag.cache_clear()
    assert scope_of(with_image(name, mm_hash), LoraNames()) == before
    assert before.tags == ()


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "more",
    [
        {"salt": LONG},
        {"salt": "\ud800"},
        {"tags": {"kvkeep.tag.a": LONG}},
        {"tags": {f"kvkeep.tag.{number}": "" for number in range(1000)}},
        {"mm_features": [MultiModalFeatureSpec(None, "image", LONG, PlaceholderRange(4, 4), LONG)]},
    ],
    ids=["salt", "surrogate", "tag", "tags", "image"],
)
def test_what_clients_choose_may_be_long(more, toy_engine):
    """The scheduler waits for no answer to a question that no worker can read."""
    engine = toy_engine()
    params = SamplingParams(max_tokens=1)
    params.extra_args = {"kv_transfer_params": more.pop("tags", None)}
    salt = more.pop("salt", None)
    request = Request("r", list(PROMPT), params, None, cache_salt=salt, **more)
    side = engine.connector._scheduler
    for _ in range(2):
        assert side.match(request, 0) == 0
    engine.generate("a", PROMPT)
    engine.generate("b", PROMPT)
    assert engine.loaded_tokens == 39
    assert engine.client.failures == {}
    side.finished(request)
    engine.finish()


def test_texts_that_differ_late_stay_apart():
    texts = [LONG, LONG + "y", "\ud800", "\ud801", "?"]
    scopes = {
        scope_of(
            Request("r", PROMPT, SamplingParams(max_tokens=1), None, cache_salt=text), LoraNames()
        )
        for text in texts
    }
    assert len(scopes) == len(texts)


@pytest.mark.parametrize("req_id", ["r" * 5000, "\u00fc\ud800"], ids=["long", "surrogate"])
def test_the_id_of_a_request_may_be_anything(req_id, toy_engine):
    engine = toy_engine()
    engine.generate("a", PROMPT)
    assert engine.generate(req_id, PROMPT) == engine.true_outputs(req_id)
    assert engine.loaded_tokens == 39
    assert engine.client.failures == {}
    engine.finish()
