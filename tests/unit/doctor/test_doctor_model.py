"""What a config.json says about a model's KV, and what fits where."""

from __future__ import annotations

import json

import pytest

from kvkeep.config import load_settings
from kvkeep.doctor import model as probes
from kvkeep.doctor.base import Level, Patient
from kvkeep.doctor.model_config import read_model, shape_of
from kvkeep.errors import ConfigError

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def patient(config, **extra):
    settings = load_settings(extra={name.replace("_", ".", 1): v for name, v in extra.items()})
    return Patient(settings, {}, None if config is None else shape_of(config, "m"))


def by_topic(findings):
    return {finding.topic: finding for finding in findings}


@pytest.mark.parametrize(
    "change, token_bytes",
    [
        ({}, 128 << 10),
        ({"torch_dtype": "float32"}, 256 << 10),
        ({"dtype": "torch.float16", "torch_dtype": None}, 128 << 10),
        ({"torch_dtype": None}, 256 << 10),
        ({"head_dim": 64}, 64 << 10),
        ({"num_key_value_heads": None}, 512 << 10),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576 * 2),
    ],
)
def test_bytes_of_a_token(change, token_bytes):
    assert shape_of(LLAMA | change, "m").token_bytes == token_bytes


@pytest.mark.parametrize(
    "change, others",
    [
        ({"layer_types": ["full_attention"]}, ()),
        ({"layer_types": ["full_attention", "linear_attention"]}, ("linear_attention",)),
        ({"sliding_window": 4096}, ("sliding_attention",)),
        ({"sliding_window": 4096, "use_sliding_window": False}, ()),
        ({"sliding_window": None}, ()),
        ({"mamba_d_state": 16}, ("mamba",)),
    ],
)
def test_layers_that_are_no_full_attention(change, others):
    assert shape_of(LLAMA | change, "m").other_layers == others


def test_names_of_older_configs():
    shape = shape_of({"n_layer": 12, "n_head": 12, "n_embd": 768}, "gpt2")
    assert (shape.num_layers, shape.num_kv_heads, shape.head_size) == (12, 12, 64)
    assert shape_of(LLAMA | {"multi_query": True}, "m").num_kv_heads == 1


def test_the_language_model_inside_of_a_larger_one():
    whole = {"text_config": LLAMA, "vision_config": {"num_hidden_layers": 2}}
    assert shape_of(whole, "m").token_bytes == 128 << 10


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "cannot read"),
        (b"{", "is no JSON"),
        (b"[1]", "is no JSON object"),
        (b"{}", "it has no 'num_hidden_layers'"),
        (json.dumps(LLAMA | {"num_hidden_layers": "many"}).encode(), "not a positive whole"),
        (json.dumps(LLAMA | {"torch_dtype": "float3"}).encode(), "known: float64"),
        (json.dumps(LLAMA | {"is_encoder_decoder": True}).encode(), "encoder-decoder"),
    ],
)
def test_a_folder_without_a_usable_config(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_model(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_what_fits_is_counted_in_whole_chunks():
    found = by_topic(
        probes.model(
            patient(LLAMA, cpu_size="1GiB", disk_path="/nowhere", disk_size="2GiB"),
        )
    )
    assert found["chunk"].values == {"tokens": 256, "bytes": 32 << 20}
    assert found["in memory"].values == {"chunks": 32, "tokens": 32 * 256}
    assert found["on disk"].values == {"chunks": 63, "tokens": 63 * 256}  # headers take room, too
    assert {finding.level for finding in found.values()} == {Level.FINE}


def test_a_pool_below_one_chunk_is_an_error_with_a_size_that_works():
    found = by_topic(probes.model(patient(LLAMA, cpu_size="20MiB")))
    assert found["in memory"].level is Level.ERROR
    line = found["in memory"].advice.line
    assert line == "cpu.size: 2GiB"


def test_a_disk_below_one_chunk_is_a_warning_with_a_size_that_works():
    settings = {"cpu_size": "1GiB", "disk_path": "/nowhere", "disk_size": "20MiB"}
    found = by_topic(probes.model(patient(LLAMA, **settings)))
    assert (found["on disk"].level, found["on disk"].values["chunks"]) == (Level.WARNING, 0)
    assert found["on disk"].advice.line == "disk.size: 2GiB"


def test_a_chunk_that_is_no_whole_number_of_pages_is_an_error_with_one_that_is():
    settings = load_settings(extra={"chunk_size": 100, "cpu.size": "1GiB"})
    found = by_topic(probes.model(Patient(settings, {}, shape_of(LLAMA, "m"))))
    assert found["chunk"].level is Level.ERROR
    assert found["chunk"].advice.line == "chunk_size: 112"


def test_a_hybrid_model_is_refused():
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    found = by_topic(probes.model(patient(LLAMA | kinds)))
    assert found["layers"].level is Level.ERROR
    assert "sliding_attention" in found["layers"].text
    assert probes.self_test(patient(LLAMA | kinds)) == []


def test_the_self_test_runs_on_the_layout_of_the_model():
    small = LLAMA | {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4}
    [found] = probes.self_test(patient(small))
    assert found.level is Level.FINE
    assert "survive" in found.text


def test_without_a_model_nothing_is_said_about_one():
    assert probes.model(patient(None)) == probes.self_test(patient(None)) == []


def test_each_rank_has_its_share_of_the_heads_and_of_the_memory():
    shape = shape_of(LLAMA, "m")
    assert shape.on_rank(4).token_bytes == 32 << 10
    assert shape.on_rank(16).num_kv_heads == 1  # heads are copied where there are too few
    latent = shape_of(LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "m")
    assert latent.on_rank(8) == latent
    settings = load_settings(extra={"cpu.size": "1GiB"})
    found = by_topic(probes.model(Patient(settings, {}, shape.on_rank(4), 4)))
    assert found["in memory"].values["tokens"] == 4 * 32 * 256
    assert "on each of 4 ranks" in found["model"].text
