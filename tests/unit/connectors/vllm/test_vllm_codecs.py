"""Codecs under vLLM: which are refused at the start; and how long prefills take is measured."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvkeep.config import load_settings
from kvkeep.connectors.vllm.build import check_codecs
from kvkeep.connectors.vllm.messages import SaveSpec, StepMeta
from kvkeep.connectors.vllm.worker import StepClock
from kvkeep.errors import ConfigError
from kvkeep.tokens import PLAIN

SAVE = SaveSpec("r", b"", PLAIN, 0, ())


def caches_config(dtype):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=dtype)
    return KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        kv_cache_layout="LBHNC",
    )


def settings_with(codec):
    return load_settings(env={}, extra={"disk.path": "/tmp/kvkeep", "disk.codec": codec})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", ["raw", "zstd", "fp8"])
def test_codecs_for_pages_of_floats(dtype, codec):
    check_codecs(settings_with(codec), caches_config(dtype))


@pytest.mark.parametrize(
    ("codec", "dtype", "message"),
    [
        ("int8", torch.bfloat16, r"disk\.codec: int8 .* Use fp8 or zstd or raw"),
        ("fp8", torch.uint8, r"disk\.codec: fp8 .* elements are uint8.* Use zstd or raw"),
        ("fp8", torch.float8_e4m3fn, r"elements are float8_e4m3fn"),
    ],
)
def test_fault_46_a_codec_that_cannot_work_stops_the_start(codec, dtype, message):
    """Instead of an engine that runs without its cache."""
    with pytest.raises(ConfigError, match=message):
        check_codecs(settings_with(codec), caches_config(dtype))


@pytest.fixture
def noted():
    return []


def clock(noted, **more):
    return StepClock(lambda tokens, seconds: noted.append((tokens, seconds >= 0)), **more)


def test_a_step_is_measured_to_the_end_of_its_forward_pass(noted):
    made = clock(noted, runs_ahead=False)
    made.loads_ended()
    made.pass_ended(StepMeta(prefill_tokens=300, saves=[SAVE]))
    made.saves_ended(StepMeta(prefill_tokens=300, saves=[SAVE]))
    assert noted == [(300, True)]


def test_where_the_device_computes_behind_the_thread_a_save_shows_the_end(noted):
    made = clock(noted, runs_ahead=True)
    for saves in ([SAVE], []):
        made.loads_ended()
        made.pass_ended(StepMeta(prefill_tokens=300, saves=saves))
        made.saves_ended(StepMeta(prefill_tokens=300, saves=saves))
    assert noted == [(300, True)]


def test_steps_that_compute_no_prompt_are_no_measure(noted):
    made = clock(noted, runs_ahead=False)
    made.loads_ended()
    made.pass_ended(StepMeta())
    made.pass_ended(StepMeta(prefill_tokens=5))  # whose start was not seen
    assert noted == []
