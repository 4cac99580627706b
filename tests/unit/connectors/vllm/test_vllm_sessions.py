"""Requests whose prompt goes on while they live: vLLM's streaming sessions, turn by turn."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from kvkeep.connectors.vllm.request import LoraNames, scope_of

PROMPT = [(7 * i) % 50 for i in range(40)]
TURN = [(3 * i + 1) % 50 for i in range(24)]


def image(content: str) -> list[MultiModalFeatureSpec]:
    return [MultiModalFeatureSpec(None, "image", content, PlaceholderRange(2, 4), content)]


@pytest.fixture
def session(toy_engine):
    """A session that has ended its first turn and waits for its next one."""
    engine = toy_engine()
    engine.scheduler.max_num_encoder_input_tokens = 1000
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(1000)
    engine.add("s", PROMPT, max_tokens=2, resumable=True)
    while engine.requests["s"].num_output_tokens < 2:
        engine.advance()
    return engine


def test_fault_9_an_image_that_a_turn_brings_is_part_of_what_is_stored(session):
    """Fault 9: a turn goes on from its blocks, so vLLM asks no connector about it."""
    params = SamplingParams(max_tokens=1)
    turn = Request("s", TURN, params, None, resumable=True, mm_features=image("h" * 64))
    session.scheduler.add_request(turn)
    session.schedule()
    request = session.requests["s"]
    [save] = session._queue[-1].scheduled.kv_connector_metadata.saves
    assert (save.start, len(save.tokens) // 4) == (40, 64)
    assert [extra.position for extra in save.scope.extras] == [
        request.mm_features[0].mm_position.offset
    ]
    assert save.scope == scope_of(request, LoraNames())


def test_a_turn_with_an_image_without_a_name_is_not_stored(session):
    params = SamplingParams(max_tokens=1)
    turn = Request("s", TURN, params, None, resumable=True, mm_features=image(""))
    session.scheduler.add_request(turn)
    session.schedule()
    assert session._queue[-1].scheduled.num_scheduled_tokens == {"s": 24}
    assert session._queue[-1].scheduled.kv_connector_metadata.saves == []
